"""Rendering recorded episodes again for another student, with its tokens and token counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from harness1.config import Env
from harness1.env.environment import SearchEnv, Step
from harness1.env.render import Context
from harness1.episodes.rollout import Nowhere, rollout
from harness1.errors import ConfigError, InfrastructureFault, SchemaError
from harness1.models.chat_format import ChatFormat
from harness1.policy.policy import Decision
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Episode, ModelCall, Task, ToolCall


def rerendered(episode: Episode, env: Env, chat: ChatFormat) -> Episode:
    """Return an episode as a `StudentFormatPolicy` of its policy would have recorded it, given the same decisions.

    With a smaller context than the teacher's, a decision may depend on a piece that the student does not see. An
    episode that does not fit is cut (`StopReason.CONTEXT_LIMIT`) and loses its reward. Ignored actions and the notes
    about them are left out.

    Args:
        env: the configuration of the recorded environment.

    Raises:
        ConfigError: the episode was recorded under another configuration.
        SchemaError: the episode cannot be replayed, or its memory differs.
    """
    twin = _Recorded(episode, env, chat)
    if twin.hash != episode.hashes.env:
        raise ConfigError("the episode was recorded under another environment: give the configuration of its run")
    try:
        again = asyncio.run(
            rollout(
                twin,
                StudentFormatPolicy(_Again(episode), chat),
                episode.task,
                seed=episode.seed,
                sample_idx=episode.sample_idx,
                group_id=episode.group_id,
            )
        )
    except (ValueError, TypeError, LookupError) as error:
        raise SchemaError(f"episode {episode.episode_id} cannot be replayed: {error!r}") from error
    for before, after in zip(episode.turns, again.turns, strict=False):
        if before.memory_hash != after.memory_hash:
            raise SchemaError(f"episode {episode.episode_id} differs in its memory at turn {before.index}")
    again = msgspec.structs.replace(again, stage_ms=episode.stage_ms)
    return again if len(again.turns) < len(episode.turns) else _ended_as(episode, again)


def _ended_as(episode: Episode, again: Episode) -> Episode:
    """Return a complete replay with the recorded end and reward."""
    hashes = msgspec.structs.replace(again.hashes, reward=episode.hashes.reward)
    return msgspec.structs.replace(
        again,
        stop_reason=episode.stop_reason,
        status=episode.status,
        error=episode.error,
        reward=episode.reward,
        hashes=hashes,
    )


class _Recorded(SearchEnv):
    """An environment that replays the recorded turns."""

    def __init__(self, episode: Episode, env: Env, chat: ChatFormat) -> None:
        super().__init__(env, Nowhere(episode.hashes.index, episode.unit), counter=chat)
        self._recorded = episode.turns

    async def step(self, actions: Sequence[ToolCall], reasoning: str = "", calls: Sequence[ModelCall] = ()) -> Step:
        turn = self._recorded[self.state.memory.turn]
        return self.replay(msgspec.structs.replace(turn, reasoning=reasoning, calls=tuple(calls), ignored=()))


class _Again:
    """A policy that repeats the recorded decisions. It is its own session: the context has the number of the turn."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.name, self.hash = "recorded", episode.hashes.policy

    def open(self, task: Task, seed: int) -> _Again:
        return self

    async def act(self, context: Context) -> Decision:
        turns = self._episode.turns
        if context.turn > len(turns):
            raise InfrastructureFault("the record ends here")
        turn = turns[context.turn - 1]
        if turn.action is None:
            return Decision(reasoning=turn.reasoning, parse_error=turn.parse_error or "no action")
        return Decision((turn.action,), turn.reasoning)

    def fork(self) -> _Again:
        return self
