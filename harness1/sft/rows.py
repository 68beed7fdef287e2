"""From a kept episode to training rows: every action is trained on the very context that it answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from harness1.config import Sft
from harness1.records import Episode, Record, Turn
from harness1.rows.calls import CapturedCall, calls_of, captured_calls, trained_calls
from harness1.rows.merging import prefix_merging
from harness1.rows.row import TrainRow, per_request

REPEATED = 3
"""A turn is repetitive if its tool is that of so many turns in a row, itself the last."""


class Origin(Record):
    """Where an episode comes from, as its rows say it."""

    dataset: str
    split: str
    teacher: str


class EpisodeRows(Record):
    """The rows of one episode, and the turns that are in none."""

    rows: tuple[TrainRow, ...]
    too_long: int = 0
    """Turns in rows of more than `sft.max_tokens`."""
    unfinished: int = 0
    """Turns in rows with an output that was cut."""
    unplaced: int = 0
    """Turns whose place in a chain is not known."""


def sft_rows(episode: Episode, sft: Sft, origin: Origin) -> EpisodeRows:
    """One row for each turn, or for each chain of turns whose prompts are prefixes of each other (`sft.rows`), in the
    order of turns. The whole output is trained, reasoning and call; log probabilities are left out. A row with an
    output that was cut teaches not to stop: it is dropped whole.

    Raises:
        SchemaError: the episode does not hold a stretch of a prompt.
    """
    calls = {call.call_id: call for call in captured_calls(episode)}
    turns = {f"{episode.episode_id}/{call.call_id}": turn for turn in episode.turns for call in turn.calls}
    weights = _weights(episode.turns, sft.repeated_weight)
    cut = {f"{episode.episode_id}/{name}" for name in _cut_calls(episode)}
    made = per_request(calls.values()) if sft.rows == "turn" else prefix_merging(calls.values()).rows
    rows, too_long, unfinished = [], 0, 0
    for row in sorted(made, key=lambda row: turns[row.call_ids[0]].index):
        if len(row.token_ids) > sft.max_tokens:
            too_long += len(row.call_ids)
        elif not cut.isdisjoint(row.call_ids):
            unfinished += len(row.call_ids)
        else:
            own = [(calls[name], turns[name]) for name in row.call_ids]
            rows.append(_sft_row(row, own, weights, episode, origin))
    placed = sum(len(row.call_ids) for row in made)
    return EpisodeRows(tuple(rows), too_long, unfinished, len(calls) - placed)


def has_token_ids(episode: Episode) -> bool:
    """Whether every turn with an action says which tokens were read and written."""
    return all(
        turn.calls and turn.calls[-1].prompt and turn.calls[-1].output_ids
        for turn in episode.turns
        if turn.action is not None
    )


def row_tokens(episode: Episode, sft: Sft) -> int:
    """About how many tokens the rows of an episode have; those of a chain of turns hold everything at least once."""
    lengths = {f"call/{call.call_id}": len(call.output_ids) for call in calls_of(episode)}
    lengths |= {key: len(ids) for key, ids in episode.segments.items()}
    if sft.rows == "epoch":
        return sum(lengths.values())
    rows = (sum(lengths.get(key, 0) for key in call.prompt) + len(call.output_ids) for call in trained_calls(episode))
    return sum(tokens for tokens in rows if tokens <= sft.max_tokens)


def _sft_row(
    row: TrainRow,
    own: Sequence[tuple[CapturedCall, Turn]],
    weights: Mapping[int, float],
    episode: Episode,
    origin: Origin,
) -> TrainRow:
    metadata = {
        "task_id": episode.task.task_id,
        "dataset": origin.dataset,
        "split": origin.split,
        "teacher": origin.teacher,
        "turns": [turn.index for _, turn in own],
        "tools": [turn.action.name for _, turn in own if turn.action is not None],
        "prompt_tokens": len(own[0][0].prompt_ids),
    }
    advantages = [float(mask) for mask in row.loss_mask]
    for call, turn in own:
        begin, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
        advantages[begin:end] = [weights[turn.index]] * (end - begin)
    weighted = any(weights[turn.index] != 1.0 for _, turn in own)
    return msgspec.structs.replace(
        row, rollout_logprobs=None, advantages=tuple(advantages) if weighted else None, metadata=metadata
    )


def _weights(turns: Sequence[Turn], repeated: float) -> dict[int, float]:
    """The weight of each turn with an action, by its number."""
    acted = [(turn.index, turn.action.name) for turn in turns if turn.action is not None]
    weights = dict.fromkeys((index for index, _ in acted), 1.0)
    for place in range(REPEATED - 1, len(acted)):
        if len({name for _, name in acted[place - REPEATED + 1 : place + 1]}) == 1:
            weights[acted[place][0]] = repeated
    return weights


def _cut_calls(episode: Episode) -> list[str]:
    """The calls whose output does not end as its model ends one. Where the record says which tokens stop, the last one
    must be among them; in every case the sampler must say that it was stopped, and not that it ran out of room."""
    return [
        call.call_id
        for call in trained_calls(episode)
        if call.finish_reason != "stop"
        or (call.sampling.stop_ids and not set(call.output_ids[-1:]) <= set(call.sampling.stop_ids))
    ]
