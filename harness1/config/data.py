"""`[data]`: which tasks of a split may be learned from. It is in no hash: cards name the tasks themselves."""

from __future__ import annotations

from typing import Literal

from harness1.settings import Count, Settings, Share


class Data(Settings):
    """The tasks that may be learned from."""

    leaks: Literal["drop", "keep"] = "drop"
    """Tasks that ask what an evaluation task asks, or share their whole gold set with one: left out, or learned."""
    near: Share = 0.8
    """A task asks what an evaluation task asks if their word sets are at least this similar (Jaccard, estimated by
    MinHash)."""
    sft_share: Share = 0.3
    """Share of the tasks that `--share sft` takes; `--share rl` takes the others. Tasks with the same gold set stay
    together."""
    seed: Count = 123
    """Seed of that division."""
