"""Tokens and calls that an episode cost its language model, or would have cost one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from harness1.records import Episode, Record, Turn
from harness1.retrieval.corpus import approximate_tokens
from harness1.rows.calls import calls_of, captured_calls, prompt_ids
from harness1.rows.merging import prefix_merging


class Tokens(Record):
    """Token counts over all calls of an episode."""

    prompt: int
    prefill: int
    """Prompt tokens that a cache of the previous call (prompt and output) does not hold."""
    output: int
    exact: bool
    """True if no count is an estimate."""


def tokens_of(episode: Episode) -> Tokens | None:
    """Return the tokens of an episode; for a policy without a model, those that its contexts would have cost, without
    output. None if no turn records the size of its context.

    A hosted model returns no ids. It is assumed that each attempt of a turn gets the turn's context, without the note
    of a retry; that the server caches the context of the previous attempt, so that only the first one has new tokens;
    and that a failed attempt, which is not recorded, was as long as the last one, estimated by its characters.

    Raises:
        SchemaError: the episode lacks a segment of a prompt.
    """
    calls = list(calls_of(episode))
    if calls and all(call.output_ids for call in calls):
        prompts = [prompt_ids(episode, call) for call in calls]
        held = [(), *(prompt + call.output_ids for prompt, call in zip(prompts, calls, strict=True))]
        prompt = sum(map(len, prompts))
        reused = sum(_common_prefix(new, old) for new, old in zip(prompts, held, strict=False))
        return Tokens(prompt, prompt - reused, sum(len(call.output_ids) for call in calls), exact=True)
    if not any(turn.prompt_tokens for turn in episode.turns):
        return None
    prompt = sum(max(1, len(turn.calls)) * turn.prompt_tokens for turn in episode.turns)
    prefill = sum(turn.prefill_tokens for turn in episode.turns)
    output = sum(len(turn.calls) * _approximate_output(turn) for turn in episode.turns)
    return Tokens(prompt, prefill, output, exact=not calls)


def model_use(episode: Episode) -> dict[str, float]:
    """Return the tokens of the contexts, if known; for a model also its calls, failed attempts included, and its output
    tokens if their ids were recorded.

    `merge_ratio` is the number of trained calls per training row: 1.0 if no prompt continues the one before.

    Raises:
        SchemaError: the episode lacks a segment of a prompt.
    """
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
        used["merge_ratio"] = prefix_merging(captured_calls(episode)).merge_ratio
    return used


def _common_prefix(new: Sequence[int], old: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(new), len(old))
    differing = np.flatnonzero(np.asarray(new[:shorter]) != np.asarray(old[:shorter]))
    return int(differing[0]) if differing.size else shorter


def _approximate_output(turn: Turn) -> int:
    """Estimate the output tokens of a hosted model in the last attempt of a turn."""
    action = msgspec.json.encode(turn.action).decode() if turn.action is not None else ""
    return approximate_tokens(turn.reasoning + action)
