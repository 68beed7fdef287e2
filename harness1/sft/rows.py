"""Training rows of kept episodes: every action is trained on the context in which it was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from harness1.config import Sft
from harness1.data.leaks import GoldSet
from harness1.records import DocId, Episode, Record, Turn
from harness1.rows.calls import CapturedCall, calls_of, captured_calls, trained_calls
from harness1.rows.merging import prefix_merging
from harness1.rows.row import TrainRow, per_request
from harness1.sft.gates import SEARCHES

REPEATED = 3
"""From this length on, a run of turns with one tool is repetitive."""


class Origin(Record):
    """The origin of an episode, for the metadata of its rows."""

    dataset: str
    split: str
    teacher: str


class EpisodeRows(Record):
    """The rows of one episode, and counts of the turns without a row."""

    rows: tuple[TrainRow, ...]
    too_long: int = 0
    """Turns in rows of more than `sft.max_tokens`."""
    unfinished: int = 0
    """Turns in rows with a truncated output."""
    unplaced: int = 0
    """Turns whose place in a chain is unknown."""


def sft_rows(episode: Episode, sft: Sft, origin: Origin, gold: GoldSet = frozenset()) -> EpisodeRows:
    """Return a row for each turn, or for each chain of turns whose prompts are prefixes of each other (`sft.rows`).

    Rows are in the order of turns and have no log probabilities. The whole output is trained, reasoning and call.
    Rows with a truncated output would teach the model not to stop, so they are dropped.

    Args:
        gold: the relevant documents of the task, for `sft.useless_weight`.

    Raises:
        SchemaError: a segment of a prompt is missing from the episode.
    """
    calls = {call.call_id: call for call in captured_calls(episode)}
    turns = {f"{episode.episode_id}/{call.call_id}": turn for turn in episode.turns for call in turn.calls}
    weights = _weights(episode.turns, sft.repeated_weight)
    if sft.useless_weight < 1.0:
        weights |= dict.fromkeys(_useless(episode.turns, gold), sft.useless_weight)
    cut = {f"{episode.episode_id}/{name}" for name in _cut_calls(episode)}
    made = per_request(calls.values()) if sft.rows == "turn" else prefix_merging(calls.values()).rows
    rows, too_long, unfinished = [], 0, 0
    for row in sorted(made, key=lambda row: turns[row.call_ids[0]].index):
        if len(row.token_ids) > sft.max_tokens:
            too_long += len(row.call_ids)
        elif not cut.isdisjoint(row.call_ids):
            unfinished += len(row.call_ids)
        else:
            taught = [(calls[name], turns[name]) for name in row.call_ids]
            rows.append(_sft_row(row, taught, weights, episode, origin))
    placed = sum(len(row.call_ids) for row in made)
    return EpisodeRows(tuple(rows), too_long, unfinished, len(calls) - placed)


def has_token_ids(episode: Episode) -> bool:
    """Return True if every turn with an action has its prompt and output tokens."""
    return all(
        turn.calls and turn.calls[-1].prompt and turn.calls[-1].output_ids
        for turn in episode.turns
        if turn.action is not None
    )


def row_tokens(episode: Episode, sft: Sft) -> int:
    """Return the approximate number of tokens in an episode's rows; chains count every segment once."""
    lengths = {f"call/{call.call_id}": len(call.output_ids) for call in calls_of(episode)}
    lengths |= {key: len(ids) for key, ids in episode.segments.items()}
    if sft.rows == "epoch":
        return sum(lengths.values())
    rows = (sum(lengths.get(key, 0) for key in call.prompt) + len(call.output_ids) for call in trained_calls(episode))
    return sum(tokens for tokens in rows if tokens <= sft.max_tokens)


def _sft_row(
    row: TrainRow,
    taught: Sequence[tuple[CapturedCall, Turn]],
    weights: Mapping[int, float],
    episode: Episode,
    origin: Origin,
) -> TrainRow:
    metadata = {
        "task_id": episode.task.task_id,
        "dataset": origin.dataset,
        "split": origin.split,
        "teacher": origin.teacher,
        "turns": [turn.index for _, turn in taught],
        "tools": [turn.action.name for _, turn in taught if turn.action is not None],
        "prompt_tokens": len(taught[0][0].prompt_ids),
    }
    mask, advantages = [0] * len(row.token_ids), [0.0] * len(row.token_ids)
    for call, turn in taught:
        begin, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
        mask[begin:end] = [1] * (end - begin)
        advantages[begin:end] = [weights[turn.index]] * (end - begin)
    weighted = any(weights[turn.index] != 1.0 for _, turn in taught)
    return msgspec.structs.replace(
        row,
        loss_mask=tuple(mask),
        rollout_logprobs=None,
        advantages=tuple(advantages) if weighted else None,
        metadata=metadata,
    )


def _weights(turns: Sequence[Turn], repeated: float) -> dict[int, float]:
    """Return the weight of each turn with an action, by its number."""
    acted = [(turn.index, turn.action.name) for turn in turns if turn.action is not None]
    weights = dict.fromkeys((index for index, _ in acted), 1.0)
    for place in range(REPEATED - 1, len(acted)):
        if len({name for _, name in acted[place - REPEATED + 1 : place + 1]}) == 1:
            weights[acted[place][0]] = repeated
    return weights


def _useless(turns: Sequence[Turn], gold: GoldSet) -> Iterator[int]:
    """Yield the numbers of the turns that searched and brought no gold document that no earlier turn had brought."""
    seen: set[DocId] = set()
    for turn in turns:
        if turn.action is None or turn.observation is None:
            continue
        brought = {hit.doc_id for hit in turn.observation.hits} & gold
        if turn.action.name in SEARCHES and brought <= seen:
            yield turn.index
        seen |= brought


def _cut_calls(episode: Episode) -> list[str]:
    """Return the calls with a truncated output: the sampler reports another reason than a stop, or the last token is
    not one of the recorded stop tokens, if there are any."""
    return [
        call.call_id
        for call in trained_calls(episode)
        if call.finish_reason != "stop"
        or (call.sampling.stop_ids and not set(call.output_ids[-1:]) <= set(call.sampling.stop_ids))
    ]
