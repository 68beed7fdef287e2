"""The named metrics of a scored episode, the tokens and calls that it cost its model, and why it fell short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from harness1.config import Env
from harness1.errors import UsageError
from harness1.records import ChunkId, DocId, Episode, Faults, Gold, Record, StopReason, UnitId
from harness1.retrieval.corpus import approximate_tokens
from harness1.reward.measures import MEASURES, Outcome, targets
from harness1.rows import prefix_merging
from harness1.rows.calls import calls_for_rows, calls_of, prompt_ids


def rerank_recall(episode: Episode, gold: Gold | None) -> float | None:
    """Return the share of the gold in an episode's reranker inputs that its outputs keep; None without any."""
    reranked = [each for observation in episode.observations for each in observation.rankings if each.pre_rerank_ids]
    given = _units((name for ranking in reranked for name in ranking.pre_rerank_ids), episode)
    kept = _units((name for ranking in reranked for name in ranking.chunk_ids), episode)
    wanted = targets(episode.task.task_id, gold, episode.unit).relevant
    found = [target for target in wanted if not target.isdisjoint(given)]
    return sum(not target.isdisjoint(kept) for target in found) / len(found) if found else None


def documents_of_hits(episode: Episode) -> dict[ChunkId, DocId]:
    """Return the document of every chunk that an episode was shown."""
    return {hit.chunk_id: hit.doc_id for observation in episode.observations for hit in observation.hits}


def _units(chunk_ids: Iterable[ChunkId], episode: Episode) -> set[UnitId]:
    # The record has no document for a chunk that was never shown: such a chunk counts for the documents with its own id
    # and with its id up to the last `#` (see `chunking.chunk`).
    if episode.unit == "chunk":
        return {UnitId(name) for name in chunk_ids}
    shown = documents_of_hits(episode)
    names = ((shown[name],) if name in shown else (name, name.rpartition("#")[0]) for name in chunk_ids)
    return {UnitId(doc_id) for each in names for doc_id in each}


_OF_OUTCOME = {
    "curated_recall": "recall",
    "curated_precision": "precision",
    "curated_f1": "f1",
    "curated_f2": "f2",
    "curated_recall_alias": "recall_alias",
    "curated_precision_alias": "precision_alias",
}
METRICS = (
    *_OF_OUTCOME,
    *("answer_recall", "answer_recall_alias", "trajectory_recall", "trajectory_answer_recall", "selection_loss"),
    *MEASURES,
    *("set_size", "turns", "reward", "duplicates_hidden", "auto_populated_kept", "tool_errors", "format_errors"),
)
"""The names of all metrics in their order, without those of single tools."""

HEADLINE = (
    *("curated_recall", "answer_recall", "trajectory_recall", "selection_loss", "curated_precision", "curated_f1"),
    *("nDCG@10", "set_size", "turns", "prompt_tokens", "prefill_tokens", "reward"),
)
"""The metrics that summarise a run and by which runs are compared; model runs and older ones may lack some."""


def metric_names(env: Env) -> tuple[str, ...]:
    """Return the metrics that exist in an environment, without those of single tools."""
    of_mechanisms = {"duplicates_hidden": env.dedup.on, "auto_populated_kept": env.auto_populate.on}
    return tuple(name for name in METRICS if of_mechanisms.get(name, True))


def measure(outcome: Outcome, episode: Episode, env: Env, gold: Gold | None = None) -> dict[str, float]:
    """Return all metrics of a scored episode, with `tool_<name>`, the number of successful calls of each tool that it
    used, and with gold `rerank_recall`, if defined. Raises UsageError: it has not been scored."""
    if episode.reward is None:
        raise UsageError(f"episode {episode.episode_id!r} has no reward: score it first")
    populated = {unit for observation in episode.observations for unit in observation.delta.auto_populated}
    of_episode = {
        "reward": episode.reward.total,
        "duplicates_hidden": float(len(episode.aliases)),
        "auto_populated_kept": float(len(populated & {entry.unit_id for entry in episode.curated})),
    }
    known = outcome.ranked | of_episode
    named = {
        name: known[name] if name in known else float(getattr(outcome, _OF_OUTCOME.get(name, name)))
        for name in metric_names(env)
    }
    if gold is not None and (kept := rerank_recall(episode, gold)) is not None:
        named["rerank_recall"] = kept
    return named | {f"tool_{name}": float(count) for name, count in outcome.calls.items()}


class Tokens(Record):
    """Token counts over all calls of an episode. `prefill`: prompt tokens that a cache of the previous call (prompt and
    output) does not hold. `exact`: true if no count is an estimate."""

    prompt: int
    prefill: int
    output: int
    exact: bool


def tokens_of(episode: Episode) -> Tokens | None:
    """Return the tokens of an episode; for a policy without a model, those that its contexts would have cost; None if
    no turn records the size of its context. A hosted model returns no ids: each attempt of a turn is assumed to get the
    turn's context, of which the server caches that of the previous attempt, and to be as long as the last one,
    estimated by its characters."""
    calls = list(calls_of(episode))
    if calls and all(call.output_ids for call in calls):
        prompts = [prompt_ids(episode, call) for call in calls]
        held = [(), *(prompt + call.output_ids for prompt, call in zip(prompts, calls, strict=True))]
        prompt = sum(map(len, prompts))
        reused = 0
        for new, old in zip(prompts, held, strict=False):
            shorter = min(len(new), len(old))
            differing = np.flatnonzero(np.asarray(new[:shorter]) != np.asarray(old[:shorter]))
            reused += int(differing[0]) if differing.size else shorter
        return Tokens(prompt, prompt - reused, sum(len(call.output_ids) for call in calls), exact=True)
    if not any(turn.prompt_tokens for turn in episode.turns):
        return None
    prompt = prefill = output = 0
    for turn in episode.turns:
        prompt += max(1, len(turn.calls)) * turn.prompt_tokens
        prefill += turn.prefill_tokens
        action = msgspec.json.encode(turn.action).decode() if turn.action is not None else ""
        output += len(turn.calls) * approximate_tokens(turn.reasoning + action)
    return Tokens(prompt, prefill, output, exact=not calls)


def model_use(episode: Episode) -> dict[str, float]:
    """Return the tokens of the contexts, if known; for a model also its calls, failed attempts included, and its output
    tokens if their ids were recorded. `merge_ratio` is the number of trained calls per training row: 1.0 if no prompt
    continues the one before."""
    calls, tokens = list(calls_of(episode)), tokens_of(episode)
    used = {}
    if tokens is not None:
        used = {"prompt_tokens": float(tokens.prompt), "prefill_tokens": float(tokens.prefill)}
    if calls:
        # All attempts of a turn but the one that gave its action, if there is one.
        failed = sum(len(turn.calls) - (turn.action is not None) for turn in episode.turns if turn.calls)
        used |= {"model_calls": float(len(calls)), "failed_attempts": float(failed)}
    if calls and tokens is not None and tokens.exact:
        used["output_tokens"] = float(tokens.output)
        used["merge_ratio"] = prefix_merging(calls_for_rows(episode)).merge_ratio
    return used


BROKEN = {
    StopReason.CONTEXT_OVERFLOW: "context limit",
    StopReason.FORMAT_LIMIT: "no readable action",
    StopReason.FAULT: "infrastructure",
}
"""The ends of an episode that is broken. The first two are the policy's failure, and count as 0."""
SHOWN_REASONS = 3


MEANINGS = {
    "fault": "the infrastructure failed",
    "format": "no action could be read",
    "context": "the context was full, or longer than the model reads",
    "unscored": "no gold to compare with",
    "complete": "all gold was delivered",
    "empty": "nothing was delivered",
    "search": "most of what is missing was never seen",
    "selection": "most of what is missing was seen and not delivered",
}
"""The classes of episodes in order of precedence; the first that applies counts."""
_BY_STOP = {
    StopReason.FAULT: "fault",
    StopReason.FORMAT_LIMIT: "format",
    StopReason.CONTEXT_LIMIT: "context",
    StopReason.CONTEXT_OVERFLOW: "context",
}


def failure_class(stop: StopReason, outcome: Outcome | None) -> str:
    """Return the class of an episode by its end and outcome, one of `MEANINGS`."""
    if stop in _BY_STOP:
        return _BY_STOP[stop]
    if outcome is None:
        return "unscored"
    if outcome.recall >= 1.0:
        return "complete"
    if outcome.set_size == 0:
        return "empty"
    unseen, unselected = 1.0 - outcome.trajectory_recall, outcome.trajectory_recall - outcome.recall
    return "search" if unseen >= unselected else "selection"


def broken(ended: Mapping[StopReason, int], said: Mapping[str, int], faults: Faults) -> dict[str, Any]:
    """Return the account of broken episodes for `metrics.json`: by the word for each end (`BROKEN`), their number, how
    they are `counted` in the means, and the infrastructure's most frequent messages (`said`, with their episodes)."""
    found: dict[str, Any] = {
        word: {"episodes": ended[stop], "counted": "zero"} for stop, word in BROKEN.items() if ended.get(stop)
    }
    if said:
        reasons = sorted(said.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_REASONS]
        found[BROKEN[StopReason.FAULT]] |= {"counted": faults, "reasons": dict(reasons)}
    return found


def broken_lines(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how many episodes of all are broken, and why with how they count."""
    for word, each in metrics.get("broken", {}).items():
        counted = "counted as 0" if each["counted"] == "zero" else "left out of the means"
        yield f"{each['episodes']:,} of {metrics['episodes']:,}", f"{word}, {counted}"


def fault_count(metrics: Mapping[str, Any]) -> int:
    """Return the number of episodes that the infrastructure broke."""
    return int(metrics["failures"]["infra_error"])


def fault_reasons(metrics: Mapping[str, Any]) -> dict[str, int]:
    """Return the most frequent messages of the infrastructure's faults, with the number of episodes of each."""
    return dict(metrics.get("broken", {}).get(BROKEN[StopReason.FAULT], {}).get("reasons", {}))
