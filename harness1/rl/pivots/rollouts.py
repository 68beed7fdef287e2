"""Single turns from a teacher's states: the state is rebuilt by replay, the policy acts once, and a verifier compares
what came of it with what came of the expert's action."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from harness1.config import Env, Machine, Pivots
from harness1.env.environment import SearchEnv, State, Step, env_hash
from harness1.env.render.context import Context
from harness1.env.render.pieces import TokenCounter
from harness1.env.verifiers.protocol import Verifier
from harness1.episodes.jobs import EpisodeJob
from harness1.episodes.rollout import rollout
from harness1.episodes.stages import Finished, Pipeline, StageFailure, StageLimits
from harness1.errors import ConfigError, HarnessError, SchemaError, UsageError
from harness1.hashing import digest
from harness1.memory.working_memory import WorkingMemory
from harness1.models.formats.chat_format import ChatFormat
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
from harness1.reward.outcome import targets
from harness1.rl.pivots.verifier import Effect, Ruling, Situation, Standing, judge, standing

if TYPE_CHECKING:
    from torch import Tensor

CACHED_EPISODES = 64
"""Episodes whose states are kept: the samples of a turn, and its sibling turns, come close together."""

Publish = Callable[[Mapping[str, "Tensor"], int], Awaitable[None]]
"""Gives the weights of a version to whatever samples, such as `TransformersBackend.load_state`."""


class Place(NamedTuple):
    """A turn of a teacher's episode; as the id of a task, `EPISODE/TURN`."""

    episode_id: str
    turn: int
    """From 1."""

    @property
    def name(self) -> str:
        return f"{self.episode_id}/{self.turn}"

    @classmethod
    def read(cls, name: str) -> Place:
        """
        Raises:
            UsageError: the name is none of a turn.
        """
        episode_id, _, turn = name.rpartition("/")
        if not episode_id or not turn.isdecimal():
            raise UsageError(f"{name!r} names no turn of an episode")
        return cls(episode_id, int(turn))


@dataclass(frozen=True)
class Scene:
    """The state before a turn of the expert, and what the expert made of it.

    Attributes:
        state: restored into an environment, never stepped itself.
        turn: the expert's.
        end: what the expert delivered at the end of the episode.
    """

    state: State
    turn: Turn
    situation: Situation
    expert: Effect
    end: Standing

    @property
    def call_outputs(self) -> dict[str, tuple[int, ...]]:
        """The outputs of earlier turns that the context shows, by the names of their segments."""
        pieces = self.state.context.pieces if self.state.context else ()
        return {f"call/{each.call.call_id}": each.call.output_ids for each in pieces if each.call is not None}

    def ruling(self, turn: Turn, after: WorkingMemory, settings: Pivots) -> Ruling:
        """How the verifier finds about a turn that was taken here, and left this memory."""
        if turn.action is None:
            return Ruling("unreadable", False)
        return judge(self.situation.effect(turn, after), self.expert, self.end, settings)


@dataclass(frozen=True)
class PivotWorld:
    """What turns are played in: the teacher's environment over the teacher's index, with tokens counted as the policy
    does, and what the verifier tolerates."""

    config: Env
    retriever: Retriever
    verifier: Verifier
    counter: TokenCounter
    machine: Machine
    pivots: Pivots

    def environment(self) -> SearchEnv:
        return SearchEnv(self.config, self.retriever, self.verifier, self.counter, self.machine)

    def scenes(self, episode: Episode, gold: Gold | None) -> tuple[Scene, ...]:
        """The states before each turn of an episode, in order, as far as the policy's context has room for them.

        Raises:
            ConfigError: the episode was recorded in another environment, or over another index.
            UsageError: the gold of its task is missing or names nothing to find.
            SchemaError: it cannot be played again.
        """
        here = {"env": env_hash(self.config), "index": self.retriever.info.index_hash}
        if wrong := [name for name, known in here.items() if known != getattr(episode.hashes, name)]:
            raise ConfigError(f"episode {episode.episode_id} was recorded with another {' and '.join(wrong)}")
        wanted = targets(episode.task.task_id, gold, episode.unit).relevant
        end = standing([entry.unit_id for entry in episode.curated], wanted)
        env = self.environment()
        env.begin(WorkingMemory.empty(episode.task.query, episode.unit))
        found: list[Scene] = []
        done: list[ToolCall] = []
        for turn in episode.turns:
            if turn.action is None or env.state.context is None:
                break
            state = env.snapshot()
            situation = Situation(state.memory, wanted, tuple(done), env.toolbox)
            again = _replayed(env, turn, episode)
            found.append(Scene(state, turn, situation, situation.effect(again, env.state.memory), end))
            done.append(turn.action)
        return tuple(found)

    async def played(self, scene: Scene, policy: Policy, job: EpisodeJob) -> Episode:
        """The episode of one turn that a policy makes of a scene, with its reward: 1 or 0, under the name of the rule
        that decided. One that the infrastructure broke has none."""
        env = _OneTurn(scene, self)
        episode = await rollout(env, policy, job.task, seed=job.seed, sample_idx=job.sample_idx, group_id=job.group_id)
        if any(turn.calls for turn in episode.turns):
            episode = msgspec.structs.replace(episode, segments=scene.call_outputs | episode.segments)
        if episode.status is Status.INFRA_ERROR or not episode.turns:
            return episode
        ruling = scene.ruling(episode.turns[0], env.state.memory, self.pivots)
        value = float(ruling.right)
        reward = RewardRecord(value, {ruling.rule: RewardTerm(value, 1.0)})
        hashes = msgspec.structs.replace(episode.hashes, reward=digest(self.pivots))
        return msgspec.structs.replace(episode, reward=reward, hashes=hashes)


class PivotRollouts:
    """`Rollouts` of single turns. The task of a job is named by the turn (`Place.name`), and its query is the
    episode's.

    Args:
        world: counts tokens as the policy does.
        episodes: the teacher's, by id, and
        golds: what there was to find, by the id of their tasks.
        publish: gives new weights to the policy.
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
            raise ConfigError("the policy counts tokens otherwise than the environment that its turns are played in")
        self._world, self._policy, self._publish = world, policy, publish
        self._episodes, self._golds = episodes, golds
        self._known: OrderedDict[str, tuple[Scene, ...]] = OrderedDict()

    async def run(
        self, jobs: Iterable[EpisodeJob] | AsyncIterable[EpisodeJob], on_episode: Callable[[Episode], None]
    ) -> None:
        """Play one turn for each job, as `Rollouts.run`.

        Raises:
            UsageError: a job names a turn that is not there, or that the policy's context has no room for.
            HarnessError: as `Rollouts.run`.
        """

        async def init(job: EpisodeJob) -> tuple[EpisodeJob, Scene]:
            return job, self.scene(Place.read(job.task.task_id))

        async def play(prepared: tuple[EpisodeJob, Scene], keep: Callable[[Episode], None]) -> Episode:
            job, scene = prepared
            return await self._world.played(scene, self._policy, job)

        async def hand_on(episode: Episode) -> Episode:
            return episode

        def hand_over(job: EpisodeJob, outcome: Finished[Episode] | StageFailure) -> None:
            if not isinstance(outcome, Finished):
                raise outcome.cause or HarnessError(outcome.error)
            on_episode(outcome.result)

        places = self._world.machine.concurrency
        limits = StageLimits(init=places, ready=places, run=places, post=places)
        await Pipeline(limits, init, play, hand_on, hand_over).process(jobs)

    async def publish(self, state: Mapping[str, Tensor], version: int) -> None:
        """As `Rollouts.publish`."""
        await self._publish(state, version)

    def scene(self, place: Place) -> Scene:
        """The scene of a turn; those of the episodes asked for last are kept.

        Raises:
            UsageError: there is no such turn, or the policy's context has no room for it.
            ConfigError, SchemaError: as `PivotWorld.scenes`.
        """
        episode = self._episodes.get(place.episode_id)
        if episode is None:
            raise UsageError(f"there is no episode {place.episode_id} among the teacher's")
        scenes = self._known.pop(place.episode_id, None)
        if scenes is None:
            scenes = self._world.scenes(episode, self._golds.get(episode.task.task_id))
        self._known[place.episode_id] = scenes
        if len(self._known) > CACHED_EPISODES:
            self._known.popitem(last=False)
        if not 1 <= place.turn <= len(scenes):
            raise UsageError(f"episode {place.episode_id} has no turn {place.turn} that the policy has room for")
        return scenes[place.turn - 1]


class _OneTurn(SearchEnv):
    """An environment whose episodes begin in a scene and end with the turn after."""

    def __init__(self, scene: Scene, world: PivotWorld) -> None:
        super().__init__(world.config, world.retriever, world.verifier, world.counter, world.machine)
        self._scene = scene

    async def reset(self, task: Task) -> Context | None:
        return self.restore(self._scene.state)

    async def step(self, actions: Sequence[ToolCall], reasoning: str = "", calls: Sequence[ModelCall] = ()) -> Step:
        step = await super().step(actions, reasoning, calls)
        return replace(step, done=step.done or StopReason.TURN_LIMIT)


def _replayed(env: SearchEnv, turn: Turn, episode: Episode) -> Turn:
    """A recorded turn played again, in the words of the policy that will go on from there.

    Raises:
        SchemaError: it cannot be, or its memory comes out as another one.
    """
    try:
        again = env.replay(_worded(turn, env.counter) if env.counter.hash != episode.hashes.counter else turn).turn
    except (ValueError, TypeError, LookupError) as error:
        raise SchemaError(f"episode {episode.episode_id} cannot be played again: {error!r}") from error
    if again.memory_hash != turn.memory_hash:
        raise SchemaError(f"episode {episode.episode_id} comes out differently at turn {turn.index}")
    return again


def _worded(turn: Turn, counter: TokenCounter) -> Turn:
    """A turn as another policy would have said it: in its format, or in plain words where it has none."""
    calls: tuple[ModelCall, ...] = ()
    if isinstance(counter, ChatFormat) and turn.action is not None:
        calls = (ModelCall(f"{turn.index}.0", output_ids=counter.format_action(turn.reasoning, turn.action)),)
    return msgspec.structs.replace(turn, calls=calls, ignored=())
