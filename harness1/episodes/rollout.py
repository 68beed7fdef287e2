"""Play one episode: the only loop in which a policy acts in an environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from harness1.env.environment import SearchEnv, Step
from harness1.env.pieces import ApproximateCounter
from harness1.env.render import Context
from harness1.errors import InfrastructureFault, Overflow
from harness1.hashing import digest
from harness1.plain import utf8_safe
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import STATUS_OF, Episode, Hashes, ModelCall, StopReason, Task, Turn

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

    An infrastructure fault does not raise: the episode ends as invalid (`Status.INFRA_ERROR`), with everything that was
    recorded until then. An episode that takes longer than `episode_deadline_s` seconds ends in the same way. A prompt
    that the model's server refuses as too long is the policy's failure (`StopReason.CONTEXT_OVERFLOW`).

    Args:
        env: is reset; nothing else may use it until the episode ends.
        policy: opens one session for the episode.
        task: its gold is hidden from both.
        seed: seeds the session, and enters the episode's id.
        sample_idx: counts from 0 the episodes of one task.
        group_id: names the group that the episode is compared with in training.
        on_step: is called after every step.

    Raises:
        UsageError: the policy cannot play this task: an oracle without its gold, a record without its query.
        Unreachable: nothing can be asked of the server of its model.
    """
    public = task.public()
    hashes = Hashes(env.hash, policy.hash, env.retriever.info.index_hash, env.counter.hash)
    record = _Record(env, on_step)
    stop, error = await record.play(policy, public, seed)
    turns, segments = record.turns, record.segments
    memory = env.state.memory
    calls = [call for turn in turns for call in turn.calls]
    return Episode(
        episode_id=episode_id(public, sample_idx, seed, hashes),
        task=public,
        sample_idx=sample_idx,
        group_id=group_id,
        seed=seed,
        turns=tuple(turns),
        stop_reason=stop,
        status=STATUS_OF[stop],
        curated=tuple(memory.curated.ranked()),
        pool=tuple(memory.pool.entries),
        aliases=dict(memory.pool.aliases),
        hashes=hashes,
        unit=memory.pool.unit,
        policy_versions=policy_versions(calls),
        stage_ms=record.clock.spent,
        error=error,
        untrainable=untrainable(calls),
        segments=segments,
        counts=_counts(env, segments),
    )


class _Record:
    """What an episode leaves while it is played: finished turns, token ids, and times."""

    def __init__(self, env: SearchEnv, on_step: OnStep | None) -> None:
        self._env, self._on_step = env, on_step
        self.turns: list[Turn] = []
        self.segments: dict[str, tuple[int, ...]] = {}
        self.clock = _Clock()

    async def play(self, policy: Policy, task: Task, seed: int) -> tuple[StopReason, str | None]:
        """Play within the deadline; return what ended the episode and, if something outside did, what it said."""
        env, session, stop = self._env, None, StopReason.FAULT
        seconds = env.world.machine.episode_deadline_s
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                context = await env.reset(task)
                session = policy.open(task, seed)
                return await self._steps(session, context), None
        except TimeoutError:
            if not deadline.expired():
                raise
            error = f"the episode took more than {seconds:g} s"
        except Overflow as refusal:
            stop, error = StopReason.CONTEXT_OVERFLOW, str(refusal)
        except InfrastructureFault as fault:
            error = str(fault)
        if (cut := getattr(session, "pending", None)) is not None:
            self.turns.append(failed_turn(env, cut))
            self.segments |= cut.segments
        return stop, error

    async def _steps(self, session: Session, context: Context | None) -> StopReason:
        """Act and step until something ends the episode."""
        while context is not None:
            decision = await session.act(context)
            self.clock.lap("policy")
            self.segments |= decision.segments
            if decision.parse_error is not None or not decision.actions:
                self.turns.append(failed_turn(self._env, decision))
                return StopReason.FORMAT_LIMIT
            step = await self._env.step(decision.actions, decision.reasoning, decision.calls)
            self.clock.lap("environment")
            self.turns.append(step.turn)
            if self._on_step is not None:
                self._on_step(step)
            if step.done is not None:
                return step.done
            context = step.context
        return StopReason.CONTEXT_LIMIT


def failed_turn(env: SearchEnv, decision: Decision) -> Turn:
    """Record a turn that produced no action, with the attempts that were made."""
    context = env.state.context
    return Turn(
        index=env.state.memory.turn + 1,
        calls=decision.calls,
        reasoning=utf8_safe(decision.reasoning),
        parse_error=utf8_safe(decision.parse_error or "no action"),
        memory_hash=env.state.memory.hash(),
        context_hash=context.hash if context is not None else "",
        prompt_tokens=context.budget.used if context is not None else 0,
        prefill_tokens=context.fresh if context is not None else 0,
    )


def _counts(env: SearchEnv, segments: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the token counts that a replay needs in place of a tokenizer; none if they were approximate."""
    if isinstance(env.counter, ApproximateCounter):
        return {}
    return {key: count for key, count in env.renderer.counts.known.items() if key not in segments}


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


class _Clock:
    """Adds up where the time of an episode went, in milliseconds."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.spent[stage] = round(self.spent.get(stage, 0.0) + (now - self._last) * 1000, 3)
        self._last = now
