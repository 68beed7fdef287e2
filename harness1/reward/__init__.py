"""The terminal reward of an episode (Harness-1, arXiv 2606.02373, Table 5): capped components, weighted and summed.

    total = override, where there is one, else max(floor, sum of weight * value)

The sum of the process components is capped, too: a term of its own takes back the excess over `PROCESS_CAP`, so
that an outcome that is better by more than twice the cap always earns more, whatever the weights. A component is a
function of a `Case` and can be named here, such as `harness1.reward.recall`. To add one, add it to `COMPONENTS`; a
plugin names its component in `harness1.rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Protocol, TypeVar

import msgspec

from harness1.config import Config, Env, Reward
from harness1.errors import InfrastructureFault, UsageError
from harness1.plugins import failure, is_interrupt, is_own, load_plugin, short_name, unfit
from harness1.records import (
    MOST_REWARD,
    Curated,
    Episode,
    Gold,
    RewardRecord,
    RewardTerm,
    Status,
    StopReason,
    Task,
    Turn,
)
from harness1.reward.measures import Outcome, delivery, f_beta, measure_outcome
from harness1.tools.registry import tools_of


@dataclass(frozen=True)
class Case:
    """What a term of the reward rates: a finished episode and its outcome (shares of the gold, counts of turns and
    calls), beside its gold, None where only the outcome is known. `config.env` says which mechanisms are on."""

    outcome: Outcome
    episode: Episode
    config: Config
    gold: Gold | None = None

    @property
    def task(self) -> Task:
        return self.episode.task

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.episode.turns

    @property
    def curated(self) -> tuple[Curated, ...]:
        """What was delivered, the first first; empty if the policy's failure ended the episode."""
        places = {entry.unit_id: entry for entry in self.episode.curated}
        return tuple(places[unit] for unit in delivery(self.episode))


@dataclass(frozen=True)
class Component:
    """A term of the reward: a value in [0, `ceiling`], or any value without one, times `reward.weights[key]`."""

    name: str
    key: str
    ceiling: float | None
    value: Callable[[Case], float]
    process: bool = False  # True if it rates how the episode went rather than what it found: their sum is capped
    cost: bool = False
    doc: str = ""  # what it rates, in one line: its docstring

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.doc)

    def weight(self, settings: Reward) -> float:
        """Return the weight, negative for a cost."""
        weight = settings.weights.get(self.key, 0.0)
        return -weight if self.cost else weight

    def term(self, case: Case) -> RewardTerm:
        """Return the capped value with its weight. Raises UsageError: a term failed, or gave no finite number."""
        settings, value = case.config.reward, number_of(self.name, self.value(case), case.task)
        if self.ceiling is not None:
            value = min(max(value, 0.0), self.ceiling)
        return RewardTerm(value, self.weight(settings))


def number_of(name: str, given: Any, task: Task) -> float:
    """Return what a term of the reward gave for a task; raise UsageError if it is not a finite number."""
    if getattr(given, "shape", None) == ():  # a scalar of numpy or torch
        given = given.item()
    size: Any = abs(given) if isinstance(given, Real) else math.nan
    if size <= MOST_REWARD:
        return float(given)
    shown = "a larger number" if size > MOST_REWARD else repr(given)
    says = f"a term is a finite number of at most {MOST_REWARD:g}"
    raise UsageError(f"the reward term {name!r} returned {shown} for task {task.task_id!r}: {says}")


def component(
    name: str, ceiling: float = 1.0, *, doc: str = "", cost: bool = False, process: bool = False
) -> Callable[[Callable[[Case], float]], Component]:
    """Turn the function that computes a value into a component with its docstring, or `doc`; `cost`: what it earns is
    taken off. Raise UsageError if the ceiling is not a number."""
    if not isinstance(ceiling, Real):
        raise UsageError(f"the ceiling of the reward term {name!r} must be a number, not {ceiling!r}")
    return lambda value: Component(name, name, ceiling, value, process, cost, doc or value.__doc__ or "")


DIVERSITY_TARGET = 6  # different tools that earn all of `diversity`; at most those offered
FREE_TURNS = 20  # turns that cost nothing
PROCESS_CAP = 0.5  # limit on the absolute sum of the process terms
FORMAT_FAILURE = -0.5  # reward of an episode that ended without a readable call, in place of the sum


answer = component("answer", doc="F, the final-answer recall of the curated set.")(
    lambda case: case.outcome.answer_recall
)
answer_found = component("answer_found", doc="1 if the curated set holds some of the answer's evidence, else 0.")(
    lambda case: float(case.outcome.answer_recall > 0.0)
)
answer_missed = component("answer_missed", cost=True, doc="max(TF - F, 0).")(
    lambda case: case.outcome.trajectory_answer_recall - case.outcome.answer_recall
)
clutter = component("clutter", cost=True, doc="Irrelevant delivered units as a share of the most that can be.")(
    lambda case: case.outcome.set_size * (1.0 - case.outcome.precision) / case.config.env.curation.cap
)
"""Unlike precision, it tells five wrong units from thirty (a linear utility, as in the filtering of TREC 2002)."""
outcome = component("outcome", doc="F_beta of curated precision and recall; beta above 1: recall weighs more.")(
    lambda case: f_beta(case.outcome.precision, case.outcome.recall, case.config.reward.beta)
)
recall = component("recall", doc="R, the curated recall.")(lambda case: case.outcome.recall)
trajectory = component("trajectory", doc="T, the trajectory recall.")(lambda case: case.outcome.trajectory_recall)
trajectory_answer = component("trajectory_answer", doc="TF, the final-answer recall of the trajectory.")(
    lambda case: case.outcome.trajectory_answer_recall
)


@component("diversity", process=True)
def diversity(case: Case) -> float:
    """Return min(d / d*, 1) of d distinct tools used successfully; d* is never more than those offered."""
    return case.outcome.tools / min(DIVERSITY_TARGET, available_tools(case.config.env))


def available_tools(env: Env) -> int:
    """Return the number of tools that the environment offers, without the one that ends the episode."""
    return len(tools_of(env)) - 1 + len(env.plugins)


@component("turn_penalty", cost=True, process=True)
def turn_penalty(case: Case) -> float:
    """Return min((n - n0) / max(N - n0, 1), 1) for n of N allowed turns, n0 of them free; 0 up to n0."""
    return (case.outcome.turns - FREE_TURNS) / max(case.config.env.max_turns - FREE_TURNS, 1)


COMPONENTS = (  # in the order in which they are summed
    *(outcome, recall, trajectory, answer_found, answer, trajectory_answer, answer_missed, clutter),
    *(diversity, turn_penalty),
)
BEYOND_CAP = "beyond_process_cap"  # the name of the term that takes back the excess over `PROCESS_CAP`
NAMES = frozenset({*(part.name for part in COMPONENTS), BEYOND_CAP})


def components(settings: Reward) -> tuple[Component, ...]:
    """Return all components, and after them those of other packages, and one's own, that the settings name. Raises
    UsageError: one is not installed, has the name of another, or cannot be imported."""
    return (*COMPONENTS, *map(plugin_component, settings.others))


class Rated(Protocol):
    """What a term rates: a `Case`, or the session of an agent."""

    @property
    def task(self) -> Task: ...


Thing = TypeVar("Thing", bound=Rated)


def call_own(name: str, value: Callable[[Thing], Any], rated: Thing) -> Any:
    """Return what a term of one's own gives; raise UsageError if it fails, but its InfrastructureFault as it is."""
    try:
        return value(rated)
    except BaseException as error:  # code of others may raise anything
        if isinstance(error, InfrastructureFault) or is_interrupt(error):
            raise
        what = f"the reward term {name!r} failed for task {rated.task.task_id!r}"
        raise UsageError(f"{what}: {failure(error)}") from error


def plugin_component(name: str) -> Component:
    """Return a component that another package adds, or one's own: any function of a case, whose value is not capped.
    Raises UsageError: there is none, it has the name of another, or it is not a component of its name."""
    found = load_plugin("rewards", name, NAMES)
    if is_own(name):
        if short_name(name) in NAMES:
            raise unfit("rewards", name, "has the name of a term of harness1: call it something else")
        value = found.value if isinstance(found, Component) else found
        if not callable(value):
            raise unfit("rewards", name, "must be a function of a case")
        called = partial(call_own, short_name(name), value)
        if isinstance(found, Component):
            return replace(found, name=short_name(name), key=name, value=called)
        return Component(short_name(name), name, None, called)
    if not isinstance(found, Component) or found.name != name:
        raise unfit("rewards", name, f"must be a component of that name: @component({name!r})")
    return found


SUM = "sum"  # the recipe without a floor and without a reward of its own for an empty set


def composite(result: Outcome, episode: Episode, config: Config, gold: Gold | None = None) -> RewardRecord | None:
    """Return the reward of an episode with a known outcome; None after an infrastructure fault. Terms of weight 0 are
    left out. An override is recorded together with the terms, which then do not count."""
    if episode.status is Status.INFRA_ERROR:
        return None
    case = Case(result, episode, config, gold)
    parts = components(config.reward)
    weighed = {part.name: part.term(case) for part in parts}
    terms = {name: term for name, term in weighed.items() if term.weight != 0.0}
    process = contributions(terms[part.name] for part in parts if part.process and part.name in terms)
    if (excess := abs(process) - PROCESS_CAP) > 0.0:
        terms[BEYOND_CAP] = RewardTerm(excess, -math.copysign(1.0, process))
    override = None
    if episode.stop_reason is StopReason.FORMAT_LIMIT:
        override = "format_failure"
    elif result.set_size == 0 and config.reward.recipe != SUM:
        override = "empty"
    return RewardRecord(total_of(terms, override, config.reward), terms, override)


def total_of(terms: Mapping[str, RewardTerm], override: str | None, settings: Reward) -> float:
    """Return the reward that terms add up to, or that of what overrides them; NaN if nothing has that name."""
    if override is not None:
        return {"format_failure": FORMAT_FAILURE, "empty": settings.empty}.get(override, math.nan)
    total = contributions(terms.values())
    return total if settings.recipe == SUM or math.isnan(total) else max(settings.floor, total)


def contributions(terms: Iterable[RewardTerm]) -> float:
    """Return the exact sum of the terms' contributions, which does not depend on their order; NaN if there is none."""
    try:
        return math.fsum(term.weight * term.value for term in terms)
    except (OverflowError, ValueError):
        return math.nan


def by_term(reward: RewardRecord) -> dict[str, float]:
    """Return the contribution of each term to a reward; an override replaces all terms."""
    if reward.override is not None:
        return {reward.override: reward.total}
    return {name: term.weight * term.value for name, term in reward.terms.items()}


def score(episode: Episode, gold: Gold | None, config: Config) -> Episode:
    """Return the episode with its reward and the hash of the weights that gave it.

    The reward has no unit; `reward.recipe = "paper"` is from Harness-1 (arXiv 2606.02373). An episode broken by the
    infrastructure gets none.

    Raises:
        UsageError: the gold of the task is missing or names nothing to find.
    """
    reward = composite(measure_outcome(episode, gold), episode, config, gold)
    hashes = msgspec.structs.replace(episode.hashes, reward=config.reward_hash)
    return msgspec.structs.replace(episode, reward=reward, hashes=hashes)
