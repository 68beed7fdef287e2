"""The terms of the reward, each capped to its ceiling: what a component is, and all of them. Adding one is one function
here and one line in `COMPONENTS` of `composite.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness1.config import Config, Env, Reward
from harness1.records import Episode, RewardTerm
from harness1.reward.outcome import Outcome, f_beta
from harness1.tools.end_search import end_search
from harness1.tools.registry import TOOLS


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


@component("answer", weight=lambda settings: settings.answer)
def answer(case: Case) -> float:
    """Final-answer recall of the curated set, F."""
    return case.outcome.answer_recall


@component("answer_found", weight=lambda settings: settings.answer_found)
def answer_found(case: Case) -> float:
    """1 where the curated set holds some of the answer's evidence, else 0."""
    return float(case.outcome.answer_recall > 0.0)


@component("answer_missed", weight=lambda settings: -settings.answer_missed)
def answer_missed(case: Case) -> float:
    """max(TF - F, 0)."""
    return case.outcome.trajectory_answer_recall - case.outcome.answer_recall


@component("clutter", weight=lambda settings: -settings.clutter)
def clutter(case: Case) -> float:
    """Irrelevant delivered units, as a share of the most that can be delivered. Unlike precision it tells a set of five
    wrong units from one of thirty (a linear utility, as in the filtering track of TREC 2002)."""
    irrelevant = case.outcome.set_size * (1.0 - case.outcome.precision)
    return irrelevant / case.config.env.curation.cap


@component("curation", weight=lambda settings: settings.curation, process=True)
def curation(case: Case) -> float:
    """min(share of turns that curated / target share, 1); 1 where the target is 0."""
    turns, target = case.outcome.turns, case.config.reward.curation_target
    if target == 0.0:
        return 1.0
    return case.outcome.curate_calls / turns / target if turns else 0.0


@component("diversity", weight=lambda settings: settings.diversity, process=True)
def diversity(case: Case) -> float:
    """min(d / d*, 1): distinct tools used with success, of the target."""
    return case.outcome.tools / target(case)


@component(
    "diversity_shortfall",
    weight=lambda settings: -settings.diversity_shortfall,
    ceiling=lambda settings: float(settings.diversity_target),
    process=True,
)
def diversity_shortfall(case: Case) -> float:
    """max(d* - d, 0): a number of tools, at most the target."""
    return float(target(case) - case.outcome.tools)


def target(case: Case) -> int:
    """d*: never more tools than the environment offers, so that a tool switched off costs no reward."""
    return min(case.config.reward.diversity_target, available_tools(case.config.env))


def available_tools(env: Env) -> int:
    """How many tools can be counted: all that the environment offers but the one that ends the episode."""
    return sum(enabled(env) for tool, enabled in TOOLS if tool is not end_search)


@component("outcome", weight=lambda settings: settings.outcome)
def outcome(case: Case) -> float:
    """F_beta of curated precision and recall; with beta above 1, recall weighs more."""
    return f_beta(case.outcome.precision, case.outcome.recall, case.config.reward.beta)


@component("recall_gap", weight=lambda settings: -settings.recall_gap)
def recall_gap(case: Case) -> float:
    """max(T - R, 0)."""
    return case.outcome.trajectory_recall - case.outcome.recall


@component("trajectory", weight=lambda settings: settings.trajectory)
def trajectory(case: Case) -> float:
    """Trajectory recall, T."""
    return case.outcome.trajectory_recall


@component("trajectory_answer", weight=lambda settings: settings.trajectory_answer)
def trajectory_answer(case: Case) -> float:
    """Final-answer recall of the trajectory, TF."""
    return case.outcome.trajectory_answer_recall


@component("turn_penalty", weight=lambda settings: -settings.turn_penalty, process=True)
def turn_penalty(case: Case) -> float:
    """min((n - n0) / max(N - n0, 1), 1) for n turns above the free n0, of N allowed; 0 up to n0."""
    free = case.config.reward.turn_penalty_from
    return (case.outcome.turns - free) / max(case.config.env.max_turns - free, 1)
