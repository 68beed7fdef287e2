"""Play single turns from a teacher's states: a state is rebuilt by replay, the policy acts once, and the verifier
compares the outcome with that of the expert's action."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from harness1.config import Env, Machine, Pivots
from harness1.env.environment import SearchEnv, State, Step, env_hash
from harness1.env.pieces import TokenCounter
from harness1.env.render import Context
from harness1.env.verifiers import Verifier
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode, return_unchanged, run_jobs
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.hashing import digest
from harness1.memory.working_memory import WorkingMemory
from harness1.models.chat_format import ChatFormat
from harness1.policy.policy import Policy, counter_of
from harness1.records import (
    Episode,
    Gold,
    ModelCall,
    RewardRecord,
    RewardTerm,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.retrieval.protocol import Retriever
from harness1.reward.measures import targets
from harness1.rl.pivots.verifier import DecisionPoint, Effect, Ruling, SetQuality, compare_effects, set_quality

if TYPE_CHECKING:
    from harness1.models.adapters import Weights

CACHED_EPISODES = 64
"""Episodes whose states are cached: the samples of a turn, and the turns of an episode, come close together."""

Publish = Callable[["Weights", int], Awaitable[None]]
"""Gives the weights of a version to the sampling backend, such as `TransformersBackend.load_state`."""


class TurnId(NamedTuple):
    """A turn of a teacher's episode; its name, `EPISODE/TURN`, serves as the id of a task."""

    episode_id: str
    turn: int
    """From 1."""

    @property
    def name(self) -> str:
        return f"{self.episode_id}/{self.turn}"

    @classmethod
    def read(cls, name: str) -> TurnId:
        """Parse the name of a turn.

        Raises:
            UsageError: the name has another form.
        """
        episode_id, _, turn = name.rpartition("/")
        if not episode_id or not turn.isdecimal():
            raise UsageError(f"{name!r} does not name a turn of an episode")
        return cls(episode_id, int(turn))


@dataclass(frozen=True)
class PivotState:
    """The state before a turn of the expert, and the effect of the expert's action.

    Attributes:
        before: a state to restore into an environment; it is never stepped itself.
        turn: the expert's turn.
        end: the quality of the set that the expert delivered.
    """

    before: State
    turn: Turn
    decision_point: DecisionPoint
    expert: Effect
    end: SetQuality

    @property
    def call_outputs(self) -> dict[str, tuple[int, ...]]:
        """The outputs of earlier turns that the context shows, by the names of their segments."""
        pieces = self.before.context.pieces if self.before.context else ()
        return {f"call/{each.call.call_id}": each.call.output_ids for each in pieces if each.call is not None}

    def ruling(self, turn: Turn, after: WorkingMemory, settings: Pivots) -> Ruling:
        """Apply the verifier to a turn that was taken here and left the memory `after`."""
        if turn.action is None:
            return Ruling("unreadable", False)
        return compare_effects(self.decision_point.effect(turn, after), self.expert, self.end, settings)


@dataclass(frozen=True)
class PivotWorld:
    """The teacher's environment and index, with tokens counted as the policy counts them, and the tolerances of the
    verifier."""

    config: Env
    retriever: Retriever
    verifier: Verifier
    counter: TokenCounter
    machine: Machine
    pivots: Pivots

    def environment(self) -> SearchEnv:
        return SearchEnv(self.config, self.retriever, self.verifier, self.counter, self.machine)

    def states(self, episode: Episode, gold: Gold | None) -> tuple[PivotState, ...]:
        """Rebuild the states before the turns of an episode, in order, until one exceeds the policy's context.

        Raises:
            ConfigError: the episode was recorded in another environment, or over another index.
            UsageError: the gold of its task is missing or empty.
            SchemaError: the episode cannot be replayed.
        """
        here = {"env": env_hash(self.config), "index": self.retriever.info.index_hash}
        if wrong := [name for name, known in here.items() if known != getattr(episode.hashes, name)]:
            raise ConfigError(f"episode {episode.episode_id} was recorded with another {' and '.join(wrong)}")
        wanted = targets(episode.task.task_id, gold, episode.unit).relevant
        end = set_quality([entry.unit_id for entry in episode.curated], wanted)
        env = self.environment()
        env.begin(WorkingMemory.empty(episode.task.query, episode.unit))
        found: list[PivotState] = []
        done: list[ToolCall] = []
        for turn in episode.turns:
            if turn.action is None or env.state.context is None:
                break
            before = env.snapshot()
            point = DecisionPoint(before.memory, wanted, tuple(done), env.toolbox)
            again = _replayed(env, turn, episode)
            found.append(PivotState(before, turn, point, point.effect(again, env.state.memory), end))
            done.append(turn.action)
        return tuple(found)

    async def play(self, state: PivotState, policy: Policy, job: EpisodeJob) -> Episode:
        """Play one turn from a state, and return its episode. The reward is 1 or 0, under the name of the rule that
        decided; an episode that the infrastructure broke has none."""
        env = _OneTurn(state, self)
        episode = await job.play(env, policy)
        if any(turn.calls for turn in episode.turns):
            episode = msgspec.structs.replace(episode, segments=state.call_outputs | episode.segments)
        if episode.status is Status.INFRA_ERROR or not episode.turns:
            return episode
        ruling = state.ruling(episode.turns[0], env.state.memory, self.pivots)
        value = float(ruling.right)
        reward = RewardRecord(value, {ruling.rule: RewardTerm(value, 1.0)})
        hashes = msgspec.structs.replace(episode.hashes, reward=digest(self.pivots))
        return msgspec.structs.replace(episode, reward=reward, hashes=hashes)


class PivotRollouts:
    """`Rollouts` of single turns. The task of a job has the name of the turn (`TurnId.name`) and the episode's query.

    Args:
        world: counts tokens as the policy does.
        episodes: the teacher's episodes, by id.
        golds: by the ids of the episodes' tasks.
        publish: gives new weights to the policy.

    Raises:
        ConfigError: the world counts tokens differently.
    """

    def __init__(
        self,
        world: PivotWorld,
        policy: Policy,
        episodes: Mapping[str, Episode],
        golds: Mapping[str, Gold | None],
        publish: Publish,
    ) -> None:
        if counter_of(policy).hash != world.counter.hash:
            raise ConfigError("the policy and the environment of its turns count tokens differently")
        self._world, self._policy, self._publish = world, policy, publish
        self._episodes, self._golds = episodes, golds
        self._states = lru_cache(CACHED_EPISODES)(self._rebuilt)

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Play one turn for each job, as `Rollouts.run`.

        Raises:
            UsageError: a job names an unknown turn, or one that exceeds the policy's context.
            HarnessError: as `Rollouts.run`.
        """
        await run_jobs(jobs, self._play, return_unchanged, on_episode, self._world.machine.concurrency)

    async def publish(self, state: Weights, version: int) -> None:
        """As `Rollouts.publish`."""
        await self._publish(state, version)

    def state(self, turn_id: TurnId) -> PivotState:
        """Return the state before a turn; those of recent episodes are cached.

        Raises:
            UsageError: there is no such turn, or it exceeds the policy's context.
            ConfigError, SchemaError: as `PivotWorld.states`.
        """
        states = self._states(turn_id.episode_id)
        if not 1 <= turn_id.turn <= len(states):
            raise UsageError(f"episode {turn_id.episode_id} has no turn {turn_id.turn} that the policy has room for")
        return states[turn_id.turn - 1]

    def _rebuilt(self, episode_id: str) -> tuple[PivotState, ...]:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise UsageError(f"there is no episode {episode_id} among the teacher's")
        return self._world.states(episode, self._golds.get(episode.task.task_id))

    async def _play(self, job: EpisodeJob) -> Episode:
        return await self._world.play(self.state(TurnId.read(job.task.task_id)), self._policy, job)


class _OneTurn(SearchEnv):
    """An environment whose episodes begin in a given state and end after one turn."""

    def __init__(self, state: PivotState, world: PivotWorld) -> None:
        super().__init__(world.config, world.retriever, world.verifier, world.counter, world.machine)
        self._before = state.before

    async def reset(self, task: Task) -> Context | None:
        return self.restore(self._before)

    async def step(self, actions: Sequence[ToolCall], reasoning: str = "", calls: Sequence[ModelCall] = ()) -> Step:
        step = await super().step(actions, reasoning, calls)
        return replace(step, done=step.done or StopReason.TURN_LIMIT)


def _replayed(env: SearchEnv, turn: Turn, episode: Episode) -> Turn:
    """Replay a recorded turn, written as the policy that continues from there would write it.

    Raises:
        SchemaError: the turn cannot be replayed, or leaves another memory.
    """
    try:
        again = env.replay(_written(turn, env.counter) if env.counter.hash != episode.hashes.counter else turn).turn
    except (ValueError, TypeError, LookupError) as error:
        raise SchemaError(f"episode {episode.episode_id} cannot be played again: {error!r}") from error
    if again.memory_hash != turn.memory_hash:
        raise SchemaError(f"episode {episode.episode_id} comes out differently at turn {turn.index}")
    return again


def _written(turn: Turn, counter: TokenCounter) -> Turn:
    """Write a turn in the policy's format, or without model calls if the policy has none."""
    calls: tuple[ModelCall, ...] = ()
    if isinstance(counter, ChatFormat) and turn.action is not None:
        calls = (ModelCall(f"{turn.index}.0", output_ids=counter.format_action(turn.reasoning, turn.action)),)
    return msgspec.structs.replace(turn, calls=calls, ignored=())
