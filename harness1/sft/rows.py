"""Training rows of kept episodes: every action is trained on the context in which it was taken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from harness1.config import Env, Sft
from harness1.data.leaks import GoldSet
from harness1.env.environment import SearchEnv, Step
from harness1.env.render import Context
from harness1.episodes.rollout import Nowhere, rollout
from harness1.errors import ConfigError, InfrastructureFault, SchemaError
from harness1.models.chat_format import ChatFormat
from harness1.policy.policy import Decision
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import DocId, Episode, ModelCall, Record, Task, ToolCall, Turn
from harness1.rows import TrainRow, make_rows
from harness1.rows.calls import calls_for_rows, calls_of, calls_to_train

SEARCHES = ("search_corpus", "fan_out_search", "grep_corpus")
REASONS = ("too_long", "unfinished", "unplaced")
"""Why a turn has no row: it is too long, was cut (which teaches not to stop), or has no known place in a chain."""


class Origin(Record):
    """The origin of an episode, for the metadata of its rows."""

    dataset: str
    split: str
    teacher: str


def sft_rows(
    episode: Episode, sft: Sft, origin: Origin, gold: GoldSet = frozenset()
) -> tuple[list[TrainRow], Counter[str]]:
    """Return a row for each turn, or for each chain of turns whose prompts are prefixes of each other (`sft.rows`), in
    the order of turns, and the number of turns without a row by `REASONS`. Rows have no log probabilities; the whole
    output is trained, reasoning and call. `gold` are the relevant documents of the task, for `sft.useless_weight`."""
    calls = list(calls_for_rows(episode))
    turns = {f"{episode.episode_id}/{call.call_id}": turn for turn in episode.turns for call in turn.calls}
    weights = {turn.index: 1.0 for turn in episode.turns if turn.action is not None}
    if sft.useless_weight < 1.0:
        weights |= dict.fromkeys(_useless(episode.turns, gold), sft.useless_weight)
    of_calls = {call.call_id: weights[turns[call.call_id].index] for call in calls}
    cut = {
        f"{episode.episode_id}/{call.call_id}"
        for call in calls_to_train(episode)
        # The sampler gives another reason than a stop, or the last token is none of the recorded stop tokens.
        if call.finish_reason != "stop"
        or (call.sampling.stop_ids and not set(call.output_ids[-1:]) <= set(call.sampling.stop_ids))
    }
    made = make_rows(calls, sft.rows, of_calls)
    rows = []
    dropped = Counter(unplaced=len(calls) - sum(len(row.call_ids) for row in made))
    for row in made:
        if len(row.token_ids) > sft.max_tokens or not cut.isdisjoint(row.call_ids):
            dropped["too_long" if len(row.token_ids) > sft.max_tokens else "unfinished"] += len(row.call_ids)
            continue
        taught = [turns[name] for name in row.call_ids]
        metadata = {
            "task_id": episode.task.task_id,
            **msgspec.structs.asdict(origin),
            "turns": [turn.index for turn in taught],
            "tools": [turn.action.name for turn in taught if turn.action is not None],
            "prompt_tokens": row.loss_mask.index(1),
        }
        advantages = row.advantages if any(of_calls[name] != 1.0 for name in row.call_ids) else None
        rows.append(msgspec.structs.replace(row, rollout_logprobs=None, advantages=advantages, metadata=metadata))
    return rows, +dropped


def has_token_ids(episode: Episode) -> bool:
    """Return True if every turn with an action has its prompt and output tokens."""
    acted = (turn.calls for turn in episode.turns if turn.action is not None)
    return all(calls and calls[-1].prompt and calls[-1].output_ids for calls in acted)


def row_tokens(episode: Episode, sft: Sft) -> int:
    """Return the approximate number of tokens in an episode's rows; chains count every segment once."""
    lengths = {f"call/{call.call_id}": len(call.output_ids) for call in calls_of(episode)}
    lengths |= {key: len(ids) for key, ids in episode.segments.items()}
    if sft.rows == "epoch":
        return sum(lengths.values())
    rows = (sum(lengths.get(key, 0) for key in call.prompt) + len(call.output_ids) for call in calls_to_train(episode))
    return sum(tokens for tokens in rows if tokens <= sft.max_tokens)


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


def rerender(episode: Episode, env: Env, chat: ChatFormat) -> Episode:
    """Return an episode as a `StudentFormatPolicy` of its policy would have recorded it in the same environment, given
    the same decisions. With a smaller context than the teacher's, a decision may depend on a piece that the student
    does not see. An episode that does not fit is cut (`StopReason.CONTEXT_LIMIT`) and loses its reward. Ignored actions
    and the notes about them are left out. Raise ConfigError if the episode was recorded under another configuration;
    SchemaError if it cannot be replayed, or its memory differs."""
    twin = _Recorded(episode, env, chat)
    if twin.hash != episode.hashes.env:
        raise ConfigError("the episode was recorded under another environment: give the configuration of its run")
    played = {name: getattr(episode, name) for name in ("seed", "sample_idx", "group_id")}
    try:
        again = asyncio.run(rollout(twin, StudentFormatPolicy(_Again(episode), chat), episode.task, **played))
    except (ValueError, TypeError, LookupError) as error:
        raise SchemaError(f"episode {episode.episode_id} cannot be replayed: {error!r}") from error
    for before, after in zip(episode.turns, again.turns, strict=False):
        if before.memory_hash != after.memory_hash:
            raise SchemaError(f"episode {episode.episode_id} differs in its memory at turn {before.index}")
    again = msgspec.structs.replace(again, stage_ms=episode.stage_ms)
    if len(again.turns) < len(episode.turns):
        return again
    hashes = msgspec.structs.replace(again.hashes, reward=episode.hashes.reward)
    end = {name: getattr(episode, name) for name in ("stop_reason", "status", "error", "reward")}
    return msgspec.structs.replace(again, hashes=hashes, **end)


class _Recorded(SearchEnv):
    def __init__(self, episode: Episode, env: Env, chat: ChatFormat) -> None:
        super().__init__(env, Nowhere(episode.hashes.index, episode.unit), counter=chat)
        self._recorded = episode.turns

    async def step(self, actions: Sequence[ToolCall], reasoning: str = "", calls: Sequence[ModelCall] = ()) -> Step:
        turn = self._recorded[self.state.memory.turn]
        return self.replay(msgspec.structs.replace(turn, reasoning=reasoning, calls=tuple(calls), ignored=()))


class _Again:
    def __init__(self, episode: Episode) -> None:
        self._turns = episode.turns
        self.name, self.hash = "recorded", episode.hashes.policy

    def open(self, task: Task, seed: int) -> _Again:
        return self

    async def act(self, context: Context) -> Decision:
        if context.turn > len(self._turns):
            raise InfrastructureFault("the record ends here")
        turn = self._turns[context.turn - 1]
        if turn.action is None:
            return Decision(reasoning=turn.reasoning, parse_error=turn.parse_error or "no action")
        return Decision((turn.action,), turn.reasoning)

    def fork(self) -> _Again:
        return self
