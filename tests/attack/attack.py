"""The attack: how many inputs a test tries, drawn from which seed, and what came of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Attack:
    """The size and the seed of an attack, and the counts that its tests report."""

    seed: int
    scale: float
    counts: dict[str, dict[str, float]] = field(default_factory=dict)

    def times(self, full: int) -> int:
        return max(1, round(full * self.scale))

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def try_all(self, inputs: SearchStrategy[Any], check: Callable[[Any], None], full: int) -> None:
        """Check drawn inputs. Hypothesis reduces one that fails to the smallest that fails alike, and prints it."""

        @seed(self.seed)
        @settings(
            max_examples=self.times(full),
            derandomize=False,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def tried(value: Any) -> None:
            check(value)

        tried()

    def report(self, name: str, **counts: float) -> None:
        self.counts[name] = counts
