"""Compare an action with the expert's by what each leads to from the same state. No words are compared and no model
judges: both actions are carried out for one step, and the changes are counted against the gold. The rules:

- `unreadable`, `error`: an output without an action, or one that the environment refuses, is never right.
- `stop`: an end of the search is right if the curated set has the recall of the expert's final set and few more useless
  documents, whatever the expert did.
- `evidence`: a discovery where the expert's surfaced evidence is right if it surfaces as much.
- `fresh`: where the expert's surfaced none, if it asks something new and finds something, or shows gold, as a full read
  does; if the expert's showed gold, it must show gold.
- `curation`: as the expert curated, if it gains as much recall, loses none, and leaves few more useless documents.
- `verify`, `review_docs`: the expert's tool, if it confirms or shows gold and misjudges no more documents.
- `other`: another kind of action, if it surfaces or curates evidence, and as much as the expert did; or if it prunes
  the curated set where the expert did neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import msgspec

from harness1.config import Env, Machine
from harness1.config.settings import put_back_removed
from harness1.env.environment import SearchEnv, State, Step, env_hash
from harness1.env.pieces import TokenCounter, counter_of
from harness1.env.render import Context
from harness1.env.verifiers import Verifier
from harness1.episodes.jobs import EpisodeJob, Jobs, OnEpisode, return_unchanged, run_jobs
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.memory.working_memory import WorkingMemory
from harness1.models.chat_format import ChatFormat
from harness1.plain import canonical, digest
from harness1.policy.policy import Policy
from harness1.records import (
    Episode,
    Gold,
    ModelCall,
    Record,
    RewardRecord,
    RewardTerm,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
    UnitId,
)
from harness1.retrieval.protocol import Retriever
from harness1.reward.measures import Target, targets
from harness1.rl.rollouts import Publish
from harness1.tools.documents import END_SEARCH
from harness1.tools.registry import Toolbox

USELESS = 2  # useless documents that an action may leave in the curated set beyond those that the teacher leaves there
REVISION = 1  # raised whenever a rule decides differently: profiles made under another revision are refused
DISCOVERY, CURATION = "discovery", "curation"  # kinds of actions; every other tool is a kind of its own


class Ruling(Record):
    """The rule that decided on an action, and its decision."""

    rule: str
    right: bool


class SetQuality(Record):
    """The recall of a curated set, and the number of its documents that serve no target."""

    recall: float
    useless: int


class Effect(Record, kw_only=True):
    """The changes that one action made. Evidence is counted in targets: relevant documents, or facts."""

    kind: str
    failed: bool = False
    fresh: bool = False  # it asked something new; a curation changed something
    found: bool = False  # it showed text that had not been found before, or relevant documents
    surfaced: int = 0  # targets seen for the first time
    gained: int = 0  # targets that became curated
    lost: int = 0  # targets that were curated and no longer are
    gold: int = 0  # relevant documents that a verdict confirmed, or that were shown
    misjudged: int = 0  # useless documents that a verdict confirmed, and relevant ones that it denied
    before: SetQuality
    after: SetQuality


class DecisionPoint(NamedTuple):
    """Where actions are compared: the memory before them, never changed, the task's targets, and the actions so far."""

    memory: WorkingMemory
    wanted: tuple[Target, ...]
    earlier: tuple[ToolCall, ...]
    toolbox: Toolbox

    def effect(self, turn: Turn, after: WorkingMemory) -> Effect:
        """Return the effect of an action, given the turn that recorded it and the memory that it left."""
        action, observed = turn.action, turn.observation
        if action is None or observed is None:
            raise ValueError("a turn without an action has no effect")
        traits, relevant = self.toolbox.traits(action.name), frozenset[UnitId]().union(*self.wanted)
        pools = self.memory.pool, after.pool  # near duplicates of what is pooled were seen, too
        before, seen = (find_served(pool.entries.keys() | pool.aliases.keys(), self.wanted) for pool in pools)
        tags, left = self.memory.curated.tags, after.curated.tags
        held, holds = find_served(tags, self.wanted), find_served(left, self.wanted)
        judged = [(each.unit_id in relevant, each.label) for each in observed.verdicts if not each.cached]
        if observed.verdicts:
            gold, fresh = judged.count((True, "yes")), bool(judged)
        else:  # equal questions may differ in case and white space
            calls = (canonical([each.name, each.arguments]) for each in (action, *self.earlier))
            asked, *earlier = (call.lower().split() for call in calls)
            gold, fresh = len({after.pool.unit_of(hit) for hit in observed.hits} & relevant), asked not in earlier
        return Effect(
            kind=DISCOVERY if traits.discovers else CURATION if traits.curates else action.name,
            failed=observed.error is not None,
            fresh=list(tags.items()) != list(left.items()) if traits.curates else fresh,
            found=gold > 0 or after.store.keys() != self.memory.store.keys(),
            surfaced=len(seen - before),
            gained=len(holds - held),
            lost=len(held - holds),
            gold=gold,
            misjudged=judged.count((False, "yes")) + judged.count((True, "no")),
            before=set_quality(tags, self.wanted),
            after=set_quality(left, self.wanted),
        )


def find_served(units: Collection[UnitId], wanted: Sequence[Target]) -> set[int]:
    """Return the positions of the targets that some of the units serve."""
    return {position for position, target in enumerate(wanted) if not target.isdisjoint(units)}


def set_quality(units: Collection[UnitId], wanted: Sequence[Target]) -> SetQuality:
    """Measure a set of units against the targets."""
    relevant = frozenset[UnitId]().union(*wanted)
    return SetQuality(len(find_served(units, wanted)) / len(wanted), sum(unit not in relevant for unit in units))


def compare_effects(act: Effect, expert: Effect, end: SetQuality) -> Ruling:
    """Decide if an action is as good as the expert's in the same state, given the quality of the expert's last set."""
    if act.failed:
        return Ruling("error", False)
    if act.kind == END_SEARCH:
        held = act.after.recall >= end.recall
        return Ruling("stop", held and act.after.useless <= end.useless + USELESS)
    if act.kind != expert.kind:
        theirs = _progress(expert)
        prunes = act.kind == CURATION and not act.lost and act.after.useless < act.before.useless
        return Ruling("other", _progress(act) >= max(1, theirs) or (not theirs and prunes))
    if act.kind == DISCOVERY:
        if expert.surfaced:
            return Ruling("evidence", act.surfaced >= expert.surfaced)
        return Ruling("fresh", act.fresh and act.found and act.gold >= min(1, expert.gold))
    if act.kind == CURATION:
        # Useless documents are the price of recall: none are tolerated where the expert gains nothing (it prunes).
        tolerated = USELESS if expert.gained else 0
        kept = act.fresh and not act.lost and act.gained >= expert.gained
        return Ruling("curation", kept and act.after.useless <= expert.after.useless + tolerated)
    return Ruling(act.kind, act.fresh and act.gold > 0 and act.misjudged <= expert.misjudged)


def _progress(effect: Effect) -> int:
    if effect.kind == DISCOVERY:
        return effect.surfaced
    if effect.kind != CURATION or effect.lost or effect.after.useless > effect.before.useless + USELESS:
        return 0
    return effect.gained


CACHED_EPISODES = 64  # whose states are kept: the samples of a turn, and the turns of an episode, come close together


class PivotState(NamedTuple):
    """The state before a turn of the expert, to restore into an environment (it is never stepped itself), the effect of
    the expert's action, and the quality of the set that the expert delivered in the end."""

    before: State
    turn: Turn
    decision_point: DecisionPoint
    expert: Effect
    end: SetQuality


class PivotWorld(NamedTuple):
    """The teacher's environment and index, with tokens counted as the policy counts them: what a `SearchEnv` takes."""

    config: Env
    retriever: Retriever
    verifier: Verifier
    counter: TokenCounter
    machine: Machine

    def states(self, episode: Episode, gold: Gold | None) -> tuple[PivotState, ...]:
        """Rebuild the states before an episode's turns, until one exceeds the policy's context; raise ConfigError for
        another environment or index; UsageError without gold; SchemaError if it cannot be replayed."""
        here = {"env": env_hash(self.config), "index": self.retriever.info.index_hash}
        if wrong := [name for name, known in here.items() if known != getattr(episode.hashes, name)]:
            raise ConfigError(f"episode {episode.episode_id} was recorded with another {' and '.join(wrong)}")
        wanted = targets(episode.task.task_id, gold, episode.unit).relevant
        end = set_quality([entry.unit_id for entry in episode.curated], wanted)
        env = SearchEnv(*self)
        env.begin(WorkingMemory.empty(episode.task.query, episode.unit))
        found: list[PivotState] = []
        done: list[ToolCall] = []
        for turn in episode.turns:
            if turn.action is None or env.state.context is None:
                break
            before = env.snapshot()
            point = DecisionPoint(before.memory, wanted, tuple(done), env.toolbox)
            again = _replay(env, turn, episode)
            found.append(PivotState(before, turn, point, point.effect(again, env.state.memory), end))
            done.append(turn.action)
        return tuple(found)

    async def play(self, state: PivotState, policy: Policy, job: EpisodeJob) -> Episode:
        """Play one turn from a state, and return its episode. The reward is 1 or 0, under the name of the rule that
        decided; an episode that the infrastructure broke has none."""
        env = _OneTurn(*self)
        env.first = state.before
        episode = await job.play(env, policy)
        if any(turn.calls for turn in episode.turns):  # the context shows outputs of earlier turns
            calls = (each.call for each in (state.before.context.pieces if state.before.context else ()))
            outputs = {f"call/{call.call_id}": call.output_ids for call in calls if call is not None}
            episode = msgspec.structs.replace(episode, segments=outputs | episode.segments)
        if episode.status is Status.INFRA_ERROR or not episode.turns:
            return episode
        ruling = Ruling("unreadable", False)
        if episode.turns[0].action is not None:
            effect = state.decision_point.effect(episode.turns[0], env.state.memory)
            ruling = compare_effects(effect, state.expert, state.end)
        value = float(ruling.right)
        reward = RewardRecord(value, {ruling.rule: RewardTerm(value, 1.0)})
        hashes = msgspec.structs.replace(episode.hashes, reward=digest(put_back_removed({}, "rl.pivots.")))
        return msgspec.structs.replace(episode, reward=reward, hashes=hashes)


class PivotRollouts:
    """`Rollouts` of single turns of the teacher's episodes, by id, with golds by the ids of their tasks. The task of a
    job has the name of the turn, `EPISODE/TURN` from 1, and the episode's query; `publish` gives new weights to the
    policy. Raise ConfigError if the world counts tokens otherwise than the policy."""

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
        self._world, self._policy, self.publish = world, policy, publish
        self._episodes, self._golds = episodes, golds
        self._states = lru_cache(CACHED_EPISODES)(self._rebuild)

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        await run_jobs(jobs, self._play, return_unchanged, on_episode, self._world.machine.concurrency)

    def state(self, name: str) -> PivotState:
        """Return the state before a turn; raise UsageError if there is none, or it exceeds the policy's context."""
        episode_id, _, turn = name.rpartition("/")
        states = self._states(episode_id)
        if not turn.isdecimal() or not 1 <= int(turn) <= len(states):
            raise UsageError(f"episode {episode_id} has no turn {turn} that the policy has room for")
        return states[int(turn) - 1]

    def _rebuild(self, episode_id: str) -> tuple[PivotState, ...]:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise UsageError(f"there is no episode {episode_id!r} among the teacher's")
        return self._world.states(episode, self._golds.get(episode.task.task_id))

    async def _play(self, job: EpisodeJob) -> Episode:
        return await self._world.play(self.state(job.task.task_id), self._policy, job)


class _OneTurn(SearchEnv):
    first: State

    async def reset(self, task: Task) -> Context | None:
        return self.restore(self.first)

    async def step(self, actions: Sequence[ToolCall], reasoning: str = "", calls: Sequence[ModelCall] = ()) -> Step:
        step = await super().step(actions, reasoning, calls)
        return replace(step, done=step.done or StopReason.TURN_LIMIT)


def _replay(env: SearchEnv, turn: Turn, episode: Episode) -> Turn:
    """Replay a recorded turn as the policy that continues would have written it: in its format, or without calls."""
    counter, written = env.counter, turn
    try:
        if counter.hash != episode.hashes.counter:
            calls: tuple[ModelCall, ...] = ()
            if isinstance(counter, ChatFormat) and turn.action is not None:
                calls = (ModelCall(f"{turn.index}.0", output_ids=counter.format_action(turn.reasoning, turn.action)),)
            written = msgspec.structs.replace(turn, calls=calls, ignored=())
        again = env.replay(written).turn
    except (ValueError, TypeError, LookupError) as error:
        raise SchemaError(f"episode {episode.episode_id} cannot be played again: {error!r}") from error
    if again.memory_hash != turn.memory_hash:
        raise SchemaError(f"episode {episode.episode_id} comes out differently at turn {turn.index}")
    return again
