"""What an episode asked of its language model, or would have asked of one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from harness1.records import Episode, Record, Turn
from harness1.retrieval.corpus import approximate_tokens
from harness1.rows.calls import calls_of, captured_calls, prompt_ids
from harness1.rows.merging import prefix_merging


class Tokens(Record):
    """Of all calls of an episode together."""

    prompt: int
    prefill: int
    """Those of the prompts that a cache of the call before, its prompt and its output, does not hold."""
    output: int
    exact: bool
    """Counted from the recorded ids; else as the environment counts contexts."""


def tokens_of(episode: Episode) -> Tokens | None:
    """The tokens of an episode. For a policy without a model, those that its contexts would have been to one, and no
    output. None where no turn tells the size of its context.

    A hosted model gives no ids. What is assumed of it: each attempt of a turn is given the context of the turn, without
    the note that a further one gets; the server holds that of the attempt before, so that only the first has tokens to
    read anew; and a failed attempt, whose words are in no record, said as much as the last one, which is estimated by
    its characters.

    Raises:
        SchemaError: the episode does not hold a stretch of a prompt.
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
    """Tokens of the contexts, where they are known; and of a model its calls, failed attempts among them, with the
    tokens of its output where their ids were recorded.

    `merge_ratio` is the number of trained calls for each training row: 1.0 where no prompt goes on from the one before.

    Raises:
        SchemaError: the episode does not hold a stretch of a prompt.
    """
    calls, tokens = list(calls_of(episode)), tokens_of(episode)
    used = {}
    if tokens is not None:
        used = {"prompt_tokens": float(tokens.prompt), "prefill_tokens": float(tokens.prefill)}
    if calls:
        used |= {"model_calls": float(len(calls)), "failed_attempts": float(sum(_failed(episode)))}
    if calls and tokens is not None and tokens.exact:
        used["output_tokens"] = float(tokens.output)
        used["merge_ratio"] = prefix_merging(captured_calls(episode)).merge_ratio
    return used


def _common_prefix(new: Sequence[int], old: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(new), len(old))
    differing = np.flatnonzero(np.asarray(new[:shorter]) != np.asarray(old[:shorter]))
    return int(differing[0]) if differing.size else shorter


def _approximate_output(turn: Turn) -> int:
    """About how many tokens a hosted model said in the last attempt of a turn."""
    action = msgspec.json.encode(turn.action).decode() if turn.action is not None else ""
    return approximate_tokens(turn.reasoning + action)


def _failed(episode: Episode) -> list[int]:
    """For each turn, the attempts that held no call."""
    return [len(turn.calls) - (turn.action is not None) for turn in episode.turns if turn.calls]
