"""Measure the episodes of a batch, for the log of a training run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from harness1.records import Episode, Gold, Status, StopReason
from harness1.reward import by_term
from harness1.reward.measures import measure_outcome
from harness1.rl.rollouts import EpisodeGroup

GoldOf = Callable[[Episode], Gold | None]


def batch_metrics(groups: Sequence[EpisodeGroup], version: int, gold_of: GoldOf) -> dict[str, float]:
    """Return means over the episodes of a batch, and its staleness.

    Args:
        version: the version of the weights to train.

    Returns:
        The values of `episode_metrics`, and `reward_std` (mean deviation within a group), `staleness` (mean) and
        `staleness_max` of the groups, in versions.
    """
    ages = [version - min(each.policy_versions[0] for each in group.episodes) for group in groups]
    within = [pstdev(each.reward.total for each in group.episodes if each.reward) for group in groups]
    return {
        **episode_metrics([each for group in groups for each in group.episodes], gold_of),
        "reward_std": fmean(within),
        "staleness": fmean(ages),
        "staleness_max": float(max(ages)),
    }


def episode_metrics(episodes: Sequence[Episode], gold_of: GoldOf) -> dict[str, float]:
    """Return means over the episodes that the infrastructure did not break; empty if there are none.

    Returns:
        `reward`, and under `term/` the contribution of each of its terms; `curated_recall`, `precision`, `set_size`,
        `turns`, `tool_errors` and `format_failures` (shares of turns and of episodes), `ended` (share of episodes that
        the policy ended itself), `output_tokens` of an episode, and under `tool/` the shares of the tools in all turns.
    """
    whole = [each for each in episodes if each.status is not Status.INFRA_ERROR]
    if not whole:
        return {}
    turns = [turn for each in whole for turn in each.turns if turn.action is not None]
    tools = Counter(turn.action.name for turn in turns if turn.action is not None)
    errors = sum(turn.observation is not None and turn.observation.error is not None for turn in turns)
    outputs = [sum(len(call.output_ids) for turn in each.turns for call in turn.calls) for each in whole]
    return {
        "reward": fmean(each.reward.total if each.reward else 0.0 for each in whole),
        **_terms(whole),
        **_outcomes([(each, gold) for each in whole if (gold := gold_of(each)) is not None]),
        "turns": len(turns) / len(whole),
        "tool_errors": errors / max(1, len(turns)),
        "format_failures": fmean(each.status is Status.POLICY_ERROR for each in whole),
        "ended": fmean(each.stop_reason is StopReason.END_SEARCH for each in whole),
        "output_tokens": fmean(outputs),
        **{f"tool/{name}": count / len(turns) for name, count in sorted(tools.items())},
    }


def _outcomes(scored: Sequence[tuple[Episode, Gold]]) -> dict[str, float]:
    """Return means over the episodes whose gold is known."""
    results = [measure_outcome(episode, gold) for episode, gold in scored]
    if not results:
        return {}
    return {
        "curated_recall": fmean(each.recall for each in results),
        "precision": fmean(each.precision for each in results),
        "set_size": fmean(each.set_size for each in results),
    }


def _terms(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the contribution of each term to the mean reward; an override replaces all terms."""
    added: defaultdict[str, float] = defaultdict(float)
    for episode in episodes:
        for name, value in by_term(episode.reward).items() if episode.reward else ():
            added[name] += value
    return {f"term/{name}": value / len(episodes) for name, value in sorted(added.items())}
