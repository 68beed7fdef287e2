"""What a component of the reward is: a named, capped value of a finished episode, and the field that weighs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness1.config import Config, Reward
from harness1.eval.outcome import Outcome
from harness1.records import Episode, RewardTerm


@dataclass(frozen=True)
class Case:
    """All that a component may look at. What the environment enables is in `config.env`."""

    outcome: Outcome
    episode: Episode
    config: Config


@dataclass(frozen=True)
class Component:
    """A value in [0, `ceiling(settings)`]; it contributes `weight(settings)` times as much, and penalties weigh
    negatively."""

    name: str
    weight: Callable[[Reward], float]
    ceiling: Callable[[Reward], float]
    value: Callable[[Case], float]
    process: bool = False
    """Whether it is about how the episode went rather than about what it found: such terms are capped in sum."""

    def term(self, case: Case) -> RewardTerm:
        """The capped value with its weight."""
        settings = case.config.reward
        return RewardTerm(min(max(self.value(case), 0.0), self.ceiling(settings)), self.weight(settings))


def component(
    name: str,
    weight: Callable[[Reward], float],
    ceiling: Callable[[Reward], float] = lambda _: 1.0,
    *,
    process: bool = False,
) -> Callable[[Callable[[Case], float]], Component]:
    """Make a component out of the function that computes its value. It counts once `composite.COMPONENTS` names it."""
    return lambda value: Component(name, weight, ceiling, value, process)
