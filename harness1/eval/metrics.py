"""The named metrics of a scored episode. To add one, add a line to `METRICS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from harness1.config import Env
from harness1.errors import UsageError
from harness1.records import ChunkId, DocId, Episode, Gold, UnitId
from harness1.reward.measures import MEASURES, Outcome, targets

Metric = Callable[[Outcome, Episode], float]


def reward(_: Outcome, episode: Episode) -> float:
    """Return the total of the recorded reward.

    Raises:
        UsageError: the episode has not been scored.
    """
    if episode.reward is None:
        raise UsageError(f"episode {episode.episode_id!r} has no reward: score it first")
    return episode.reward.total


def auto_populated_kept(_: Outcome, episode: Episode) -> float:
    """Return the number of delivered units that the environment, not the policy, curated."""
    populated = {unit for observation in episode.observations for unit in observation.delta.auto_populated}
    return float(len(populated & {entry.unit_id for entry in episode.curated}))


def rerank_recall(episode: Episode, gold: Gold | None) -> float | None:
    """Return the share of the gold in an episode's reranker inputs that its outputs keep; None without any gold.

    Raises:
        UsageError: the gold is missing or names nothing to find.
    """
    reranked = [each for observation in episode.observations for each in observation.rankings if each.pre_rerank_ids]
    given = _units((name for ranking in reranked for name in ranking.pre_rerank_ids), episode)
    kept = _units((name for ranking in reranked for name in ranking.chunk_ids), episode)
    wanted = targets(episode.task.task_id, gold, episode.unit).relevant
    found = [target for target in wanted if not target.isdisjoint(given)]
    return sum(not target.isdisjoint(kept) for target in found) / len(found) if found else None


def shown_documents(episode: Episode) -> dict[ChunkId, DocId]:
    """Return the document of every chunk that an episode was shown."""
    return {hit.chunk_id: hit.doc_id for observation in episode.observations for hit in observation.hits}


def _units(chunk_ids: Iterable[ChunkId], episode: Episode) -> set[UnitId]:
    """Return the units of chunks. The record has no document for a chunk that was never shown: such a chunk counts for
    the documents with its own id and with its id up to the last `#` (see `chunking.chunk`)."""
    if episode.unit == "chunk":
        return {UnitId(name) for name in chunk_ids}
    shown = shown_documents(episode)
    return {
        UnitId(doc_id)
        for name in chunk_ids
        for doc_id in ((shown[name],) if name in shown else (name, name.rpartition("#")[0]))
    }


def _ranked(name: str) -> Metric:
    return lambda outcome, _: outcome.ranked[name]


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "curated_recall": lambda outcome, _: outcome.recall,
        "curated_precision": lambda outcome, _: outcome.precision,
        "curated_f1": lambda outcome, _: outcome.f1,
        "curated_f2": lambda outcome, _: outcome.f2,
        "curated_recall_alias": lambda outcome, _: outcome.recall_alias,
        "curated_precision_alias": lambda outcome, _: outcome.precision_alias,
        "answer_recall": lambda outcome, _: outcome.answer_recall,
        "answer_recall_alias": lambda outcome, _: outcome.answer_recall_alias,
        "trajectory_recall": lambda outcome, _: outcome.trajectory_recall,
        "trajectory_answer_recall": lambda outcome, _: outcome.trajectory_answer_recall,
        "selection_loss": lambda outcome, _: outcome.selection_loss,
        **{name: _ranked(name) for name in MEASURES},
        "set_size": lambda outcome, _: float(outcome.set_size),
        "turns": lambda outcome, _: float(outcome.turns),
        "reward": reward,
        "duplicates_hidden": lambda _, episode: float(len(episode.aliases)),
        "auto_populated_kept": auto_populated_kept,
        "tool_errors": lambda outcome, _: float(outcome.tool_errors),
        "format_errors": lambda outcome, _: float(outcome.format_errors),
    }
)

HEADLINE = (
    "curated_recall",
    "answer_recall",
    "trajectory_recall",
    "selection_loss",
    "curated_precision",
    "curated_f1",
    "nDCG@10",
    "set_size",
    "turns",
    "prompt_tokens",
    "prefill_tokens",
    "reward",
)
"""The metrics that summarise a run and by which runs are compared; model runs and older ones may lack some."""

_MECHANISM: Mapping[str, Callable[[Env], bool]] = MappingProxyType(
    {
        "duplicates_hidden": lambda env: env.dedup.on,
        "auto_populated_kept": lambda env: env.auto_populate.on,
    }
)
"""Metrics of a single mechanism, which exist only while it is on."""


def metric_names(env: Env) -> tuple[str, ...]:
    """Return the metrics that exist in an environment, without those of single tools."""
    return tuple(name for name in METRICS if name not in _MECHANISM or _MECHANISM[name](env))


def measure(outcome: Outcome, episode: Episode, env: Env, gold: Gold | None = None) -> dict[str, float]:
    """Return all metrics of one scored episode, and `tool_<name>`, the number of successful calls of each tool that it
    used.

    With gold this includes `rerank_recall`, if defined.

    Raises:
        UsageError: the episode has not been scored.
    """
    named = {name: METRICS[name](outcome, episode) for name in metric_names(env)}
    if gold is not None and (kept := rerank_recall(episode, gold)) is not None:
        named["rerank_recall"] = kept
    return named | {f"tool_{name}": float(count) for name, count in outcome.calls.items()}
