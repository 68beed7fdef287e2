"""One episode: play it (`rollout` is the only loop in which a policy acts in an environment), or replay it from its
record, where every hash must come out equal: offline, with the recorded answers, or live, against an index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from harness1.config import Env, Machine
from harness1.env.environment import SearchEnv, Step, env_hash
from harness1.env.model_verifiers import open_verifier
from harness1.env.pieces import ApproximateCounter, TokenCounter
from harness1.env.render import Context, RecordedCounter
from harness1.errors import ConfigError, InfrastructureFault, Overflow, SchemaError
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import digest, utf8_safe
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import (
    STATUS_OF,
    Chunk,
    ChunkId,
    Episode,
    Hashes,
    ModelCall,
    Observation,
    Record,
    StopReason,
    Task,
    Turn,
    Unit,
)
from harness1.retrieval.corpus import approximate_tokens
from harness1.retrieval.protocol import IndexInfo, RetrievalFault, Retriever, SearchRequest, SearchResult

OnStep = Callable[[Step], None]


async def rollout(
    env: SearchEnv,
    policy: Policy,
    task: Task,
    *,
    seed: int = 0,
    sample_idx: int = 0,
    group_id: str | None = None,
    on_step: OnStep | None = None,
) -> Episode:
    """Play one episode to its end and return its record, without a reward.

    An infrastructure fault, or more than `episode_deadline_s` seconds, ends the episode as invalid
    (`Status.INFRA_ERROR`), with everything that was recorded until then. A prompt that the model's server refuses as
    too long is the policy's failure (`StopReason.CONTEXT_OVERFLOW`).

    Args:
        env: is reset; nothing else may use it until the episode ends.
        task: its gold is hidden from environment and policy.
        seed: seeds the session, and enters the episode's id.
        sample_idx: counts from 0 the episodes of one task.
        group_id: names the group that the episode is compared with in training.

    Raises:
        UsageError: the policy cannot play this task: an oracle without its gold, a record without its query.
        Unreachable: nothing can be asked of the server of its model.
    """
    public = task.public()
    hashes = Hashes(env.hash, policy.hash, env.retriever.info.index_hash, env.counter.hash)
    record = _Record(env, on_step)
    stop, error = await record.play(policy, public, seed)
    memory, turns, segments = env.state.memory, record.turns, record.segments
    calls = [call for turn in turns for call in turn.calls]
    counts = {} if isinstance(env.counter, ApproximateCounter) else env.renderer.counts.known
    return Episode(
        episode_id=episode_id(public, sample_idx, seed, hashes),
        task=public,
        sample_idx=sample_idx,
        group_id=group_id,
        seed=seed,
        turns=tuple(turns),
        stop_reason=stop,
        status=STATUS_OF[stop],
        curated=tuple(memory.curated.in_order()),
        pool=tuple(memory.pool.entries),
        aliases=dict(memory.pool.aliases),
        hashes=hashes,
        unit=memory.pool.unit,
        policy_versions=policy_versions(calls),
        stage_ms=record.spent_ms,
        error=error,
        untrainable=untrainable(calls),
        segments=segments,
        counts={key: count for key, count in counts.items() if key not in segments},
    )


class _Record:
    def __init__(self, env: SearchEnv, on_step: OnStep | None) -> None:
        self._env, self._on_step = env, on_step
        self.turns: list[Turn] = []
        self.segments: dict[str, tuple[int, ...]] = {}
        self.spent_ms: dict[str, float] = {}
        self._last = time.perf_counter()

    async def play(self, policy: Policy, task: Task, seed: int) -> tuple[StopReason, str | None]:
        # Return what ended the episode and, if something outside did, what it said.
        env, session, stop = self._env, None, StopReason.FAULT
        seconds = env.world.machine.episode_deadline_s
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                context = await env.reset(task)
                session = policy.open(task, seed)
                return await self._steps(session, context, deadline), None
        except TimeoutError:
            if not deadline.expired():
                raise
            error = f"the episode took more than {seconds:g} s"
        except Overflow as refusal:
            stop, error = StopReason.CONTEXT_OVERFLOW, str(refusal)
        except InfrastructureFault as fault:
            error = str(fault)
        if (cut := getattr(session, "pending", None)) is not None:
            self.turns.append(record_failure(env, cut))
            self.segments |= cut.segments
        return stop, error

    async def _steps(self, session: Session, context: Context | None, deadline: asyncio.Timeout) -> StopReason:
        clock, unhurried = asyncio.get_running_loop().time, getattr(session, "unhurried", False)
        while context is not None:
            begun, end = clock(), deadline.when()
            if unhurried:
                deadline.reschedule(None)
            decision = await session.act(context)
            if unhurried and end is not None:
                deadline.reschedule(end + clock() - begun)
            self._lap("policy")
            self.segments |= decision.segments
            if decision.parse_error is not None or not decision.actions:
                self.turns.append(record_failure(self._env, decision))
                return StopReason.FORMAT_LIMIT
            step = await self._env.step(decision.actions, decision.reasoning, decision.calls)
            self._lap("environment")
            self.turns.append(step.turn)
            if self._on_step is not None:
                self._on_step(step)
            if step.done is not None:
                return step.done
            context = step.context
        return StopReason.CONTEXT_LIMIT

    def _lap(self, stage: str) -> None:
        before, self._last = self._last, time.perf_counter()
        self.spent_ms[stage] = round(self.spent_ms.get(stage, 0.0) + (self._last - before) * 1000, 3)


def record_failure(env: SearchEnv, decision: Decision) -> Turn:
    """Record a turn that produced no action, with the attempts that were made."""
    turn = Turn(
        index=env.state.memory.turn + 1,
        calls=decision.calls,
        reasoning=utf8_safe(decision.reasoning),
        parse_error=utf8_safe(decision.parse_error or "no action"),
        memory_hash=env.state.memory.hash(),
    )
    if (context := env.state.context) is None:
        return turn
    counts = {"prompt_tokens": context.budget.used, "prefill_tokens": context.fresh}
    return msgspec.structs.replace(turn, context_hash=context.hash, **counts)


def episode_id(task: Task, sample_idx: int, seed: int, hashes: Hashes) -> str:
    """Return the id of an episode: 16 hexadecimal digits of everything that decides it."""
    return digest([task, sample_idx, seed, hashes.env, hashes.policy, hashes.index])[:16]


def policy_versions(calls: Sequence[ModelCall]) -> tuple[int, int]:
    """Return the lowest and the highest version of the policy that made these calls; zeros without a call."""
    versions = [version for call in calls for version in (call.policy_version_start, call.policy_version_end)]
    return min(versions, default=0), max(versions, default=0)


def untrainable(calls: Sequence[ModelCall]) -> str | None:
    """Return what the model calls lack for training, or None."""
    if not all(call.output_ids for call in calls):
        return "its model gives no token ids"
    if not all(call.output_logprobs for call in calls):
        return "its outputs have no log probabilities"
    return None


class ReplayReport(Record):
    """The result of a replay: `equal` of `turns` have equal hashes; `difference` describes the first that does not."""

    turns: int
    equal: int
    difference: str | None = None


class Nowhere:
    """A retriever that returns only faults, because replay must not need one."""

    def __init__(self, index_hash: str, unit: Unit) -> None:
        self.info = IndexInfo(index_hash, unit, 0, 0)

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        return [_ABSENT for _ in requests]

    async def get(self, *_: object, **__: object) -> tuple[Chunk, ...] | RetrievalFault:
        return _ABSENT

    grep = read = get


_ABSENT = RetrievalFault("a replay has no index")


def replay_env(episode: Episode, env: Env, counter: TokenCounter | None = None) -> SearchEnv:
    """Return an environment at the start of a recorded episode, for `env.replay(turn)`; raises as `replay_episode`."""
    _same_environment(env, episode)
    counter = counter or counter_of_record(episode)
    try:
        twin = SearchEnv(env, Nowhere(episode.hashes.index, episode.unit), counter=counter)
        twin.begin(WorkingMemory.empty(episode.task.query, episode.unit))
    except LookupError as error:
        raise SchemaError(f"episode {episode.episode_id} lacks the token count of {error}") from error
    return twin


def replay_episode(episode: Episode, env: Env, counter: TokenCounter | None = None) -> ReplayReport:
    """Rebuild an episode from its record alone; compare every observation and hash, and the delivered set.

    Context hashes are compared only where `counter` is the one that the episode was rendered with (default: its own).

    Raises:
        ConfigError: the episode was recorded under another environment configuration.
        SchemaError: the record lacks a token count that a context was measured with.
    """
    twin = replay_env(episode, env, counter)

    async def again(turn: Turn) -> Step:
        return twin.replay(turn)

    return asyncio.run(_compare(episode, twin, again))


async def replay_live(episode: Episode, env: Env, retriever: Retriever, machine: Machine | None = None) -> ReplayReport:
    """Carry out the recorded actions against an index and compare as `replay_episode` does. Raises ConfigError: the
    index or the configuration is another; InfrastructureFault: the index failed."""
    if retriever.info.index_hash != episode.hashes.index:
        raise ConfigError("the index differs from the one that the episode was recorded with")
    _same_environment(env, episode)
    machine = machine or Machine()
    twin = SearchEnv(env, retriever, open_verifier(env, machine), counter_of_record(episode), machine)
    await twin.reset(episode.task)

    async def again(turn: Turn) -> Step:
        actions = [turn.action, *turn.ignored] if turn.action else []
        return await twin.step(actions, turn.reasoning, turn.calls)

    return await _compare(episode, twin, again)


def counter_of_record(episode: Episode) -> TokenCounter:
    """Return what counted an episode's tokens, or its recorded counts if that was a model's tokenizer."""
    return ApproximateCounter.of_hash(episode.hashes.counter) or RecordedCounter(episode)


def _same_environment(env: Env, episode: Episode) -> None:
    if env_hash(env) != episode.hashes.env:
        raise ConfigError("the episode was recorded under another environment: give the configuration of its run")


async def _compare(episode: Episode, twin: SearchEnv, again: Callable[[Turn], Awaitable[Step]]) -> ReplayReport:
    contexts = twin.counter.hash == episode.hashes.counter
    done = None if twin.state.context else StopReason.CONTEXT_LIMIT
    equal, difference = 0, None
    for turn in episode.turns:
        if done is not None:
            difference = difference or f"turn {turn.index}: the episode had ended by {done}"
            break
        if turn.action is None:
            # It changes nothing: it must name the state before it.
            bare = msgspec.structs.replace(turn, observation=None)
            found = difference_between(bare, record_failure(twin, Decision()), contexts=contexts)
            done = StopReason.FORMAT_LIMIT
        elif turn.observation is None:
            difference = difference or f"turn {turn.index}: its observation is missing"
            break
        else:
            try:
                step = await again(turn)
            except (ValueError, TypeError, LookupError) as error:
                difference = difference or f"turn {turn.index}: it cannot be played again ({error!r})"
                break
            found, done = difference_between(turn, step.turn, contexts=contexts), step.done
        equal += found is None
        difference = difference or found
    if episode.stop_reason is StopReason.CONTEXT_OVERFLOW and done in (None, StopReason.FORMAT_LIMIT):
        done = episode.stop_reason  # a server's word, which nothing here can derive
    calls, memory = [call for turn in episode.turns for call in turn.calls], twin.state.memory
    ends: dict[str, tuple[object, object]] = {
        "stop reason": (episode.stop_reason, done),
        "status": (episode.status, STATUS_OF.get(episode.stop_reason)),
        "curated set": (episode.curated, tuple(memory.curated.in_order())),
        "pool": (episode.pool, tuple(memory.pool.entries)),
        "aliases": (episode.aliases, memory.pool.aliases),
        "unit": (episode.unit, memory.pool.unit),
        "id": (episode.episode_id, episode_id(episode.task, episode.sample_idx, episode.seed, episode.hashes)),
        "policy versions": (episode.policy_versions, policy_versions(calls)),
        "reason against training": (episode.untrainable, untrainable(calls)),
    }
    wrong = [name for name, (recorded, rebuilt) in ends.items() if recorded != rebuilt]
    ending = f"at the end: {', '.join(wrong)} differ" if wrong else None
    return ReplayReport(len(episode.turns), equal, difference or ending)


def difference_between(turn: Turn, again: Turn, *, contexts: bool) -> str | None:
    """Return the difference between a recorded turn and its replay, in one line, or None."""
    if turn.index != again.index:
        return f"turn {again.index} is recorded as {turn.index}"
    if found := _answer_difference(turn.observation, again.observation):
        return f"turn {turn.index}: {found}"
    if turn.memory_hash != again.memory_hash:
        return f"turn {turn.index}: memory hash {again.memory_hash[:12]}, recorded {turn.memory_hash[:12]}"
    if contexts and turn.context_hash != again.context_hash:
        return f"turn {turn.index}: context hash {again.context_hash[:12]}, recorded {turn.context_hash[:12]}"
    for name in ("prompt_tokens", "prefill_tokens") if contexts else ():
        recorded, rebuilt = getattr(turn, name), getattr(again, name)
        if recorded != rebuilt and turn.prompt_tokens:  # early versions recorded neither
            return f"turn {turn.index}: {name.replace('_', ' ')} {rebuilt}, recorded {recorded}"
    return None


def _answer_difference(recorded: Observation | None, again: Observation | None) -> str | None:
    if recorded is None or again is None:
        return None if recorded is again else "one observation is missing"
    for name in Observation.__struct_fields__:
        before, after = getattr(recorded, name), getattr(again, name)
        if name == "hits":
            before, after = ([msgspec.structs.replace(hit, score=0.0) for hit in hits] for hits in (before, after))
        if before != after:
            return f"{name} of the observation differ"
    places: dict[ChunkId, int] = {}
    for ranking in recorded.rankings:
        for rank, chunk_id in enumerate(ranking.chunk_ids):
            places.setdefault(chunk_id, rank)
    for hit in recorded.hits:
        if hit.tokens != approximate_tokens(hit.text) or hit.rank != places.get(hit.chunk_id, hit.rank):
            return f"hit {hit.chunk_id} has another rank or size than was found"
    return None
