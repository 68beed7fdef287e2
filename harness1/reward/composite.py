"""The terminal reward of an episode (Harness-1, arXiv 2606.02373, Table 5): capped components, weighted and summed.

    total = override, where there is one, else max(floor, sum of weight * value)

The sum of the process components is capped, too: a term of its own takes back the excess over `reward.process_cap`, and
the terms still add up to the total. Two episodes therefore differ by at most twice the cap in process terms, whatever
their weights; an outcome that is better by more than that always earns more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness1.config import Config, Reward
from harness1.records import Episode, Gold, RewardRecord, RewardTerm, Status, StopReason
from harness1.reward.components import BEYOND_CAP, Case, Component, components
from harness1.reward.outcome import Outcome, outcome

SUM = "sum"
"""The recipe without a floor and without a reward of its own for an empty set."""


def composite(result: Outcome, episode: Episode, config: Config, gold: Gold | None = None) -> RewardRecord | None:
    """Return the reward of an episode with a known outcome; None after an infrastructure fault, which earns no reward.

    Terms of weight 0 are left out. An override is recorded together with the terms, which then do not count.
    """
    if episode.status is Status.INFRA_ERROR:
        return None
    case = Case(result, episode, config, gold)
    parts = components(config.reward)
    weighed = {part.name: part.term(case) for part in parts}
    terms = {name: term for name, term in weighed.items() if term.weight != 0.0}
    terms |= _beyond_cap(terms, parts, config.reward.process_cap)
    if (override := _override(result, episode, config.reward)) is not None:
        name, total = override
        return RewardRecord(total, terms, name)
    return RewardRecord(total_of(terms.values(), config.reward), terms)


def total_of(terms: Iterable[RewardTerm], settings: Reward) -> float:
    """Return the reward that terms add up to, where nothing overrides them."""
    total = contributions(terms)
    return total if settings.recipe == SUM else max(settings.floor, total)


def contributions(terms: Iterable[RewardTerm]) -> float:
    """Return the exact sum of the terms' contributions, which does not depend on their order."""
    return math.fsum(term.weight * term.value for term in terms)


def by_term(reward: RewardRecord) -> dict[str, float]:
    """Return the contribution of each term to a reward; an override replaces all terms."""
    if reward.override is not None:
        return {reward.override: reward.total}
    return {name: term.weight * term.value for name, term in reward.terms.items()}


def score(episode: Episode, gold: Gold | None, config: Config) -> Episode:
    """Return the episode with its reward and the hash of the weights that gave it.

    The reward is the sum of weight x value over the components, with a floor, or one override. It has no unit; a value
    is capped at its ceiling, 1 by default. `reward.recipe = "paper"` is from Harness-1 (arXiv 2606.02373). An episode
    broken by the infrastructure gets none.

    Raises:
        UsageError: the gold of the task is missing or names nothing to find.
    """
    reward = composite(outcome(episode, gold), episode, config, gold)
    hashes = msgspec.structs.replace(episode.hashes, reward=config.reward_hash)
    return msgspec.structs.replace(episode, reward=reward, hashes=hashes)


def _beyond_cap(terms: Mapping[str, RewardTerm], parts: Sequence[Component], cap: float) -> dict[str, RewardTerm]:
    """Return the term that takes back the process terms' excess over the cap; empty if there is none."""
    process = contributions(terms[part.name] for part in parts if part.process and part.name in terms)
    excess = abs(process) - cap
    return {BEYOND_CAP: RewardTerm(excess, -math.copysign(1.0, process))} if excess > 0.0 else {}


def _override(result: Outcome, episode: Episode, settings: Reward) -> tuple[str, float] | None:
    if episode.stop_reason is StopReason.FORMAT_LIMIT:
        return "format_failure", settings.format_failure
    if result.set_size == 0 and settings.recipe != SUM:
        return "empty", settings.empty
    return None
