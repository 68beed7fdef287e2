"""The one loop in which a policy meets an environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from harness1.env.environment import SearchEnv, Step
from harness1.env.render.context import Context
from harness1.env.render.pieces import ApproximateCounter
from harness1.errors import InfrastructureFault
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
    recorded until then. So does an episode that takes longer than `episode_deadline_s` seconds.

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
    """
    public = task.public()
    hashes = Hashes(env.hash, policy.hash, env.retriever.info.index_hash, env.counter.hash)
    turns: list[Turn] = []
    segments: dict[str, tuple[int, ...]] = {}
    clock = _Clock()
    stop, error = await _run(env, policy, public, seed, turns, segments, clock, on_step)
    memory = env.state.memory
    versions = [version for turn in turns for call in turn.calls for version in _versions(call)]
    return Episode(
        episode_id=digest([public, sample_idx, seed, hashes.env, hashes.policy, hashes.index])[:16],
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
        policy_versions=(min(versions, default=0), max(versions, default=0)),
        stage_ms=clock.spent,
        error=error,
        untrainable=_untrainable(turns),
        segments=segments,
        counts=_counts(env, segments),
    )


async def _run(
    env: SearchEnv,
    policy: Policy,
    task: Task,
    seed: int,
    turns: list[Turn],
    segments: dict[str, tuple[int, ...]],
    clock: _Clock,
    on_step: OnStep | None,
) -> tuple[StopReason, str | None]:
    """Play within the deadline; return what ended the episode and, if the infrastructure failed, how."""
    session: Session | None = None
    deadline = asyncio.timeout(env.world.machine.episode_deadline_s)
    try:
        async with deadline:
            context = await env.reset(task)
            session = policy.open(task, seed)
            return await _play(env, session, context, turns, segments, clock, on_step), None
    except TimeoutError:
        if not deadline.expired():
            raise
        error = f"the episode took more than {env.world.machine.episode_deadline_s:g} s"
    except InfrastructureFault as fault:
        error = str(fault)
    if (cut := getattr(session, "pending", None)) is not None:
        turns.append(_failed_turn(env, cut))
        segments |= cut.segments
    return StopReason.FAULT, error


async def _play(
    env: SearchEnv,
    session: Session,
    context: Context | None,
    turns: list[Turn],
    segments: dict[str, tuple[int, ...]],
    clock: _Clock,
    on_step: OnStep | None,
) -> StopReason:
    """Act and step until something ends the episode; finished turns are appended as they come."""
    while context is not None:
        decision = await session.act(context)
        clock.lap("policy")
        segments |= decision.segments
        if decision.parse_error is not None or not decision.actions:
            turns.append(_failed_turn(env, decision))
            return StopReason.FORMAT_LIMIT
        step = await env.step(decision.actions, decision.reasoning, decision.calls)
        clock.lap("environment")
        turns.append(step.turn)
        if on_step is not None:
            on_step(step)
        if step.done is not None:
            return step.done
        context = step.context
    return StopReason.CONTEXT_LIMIT


def _failed_turn(env: SearchEnv, decision: Decision) -> Turn:
    """A turn that came to no action, with the attempts at it."""
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
    """What a replay needs in place of a tokenizer, beside the segments; nothing, where it was an approximation."""
    if isinstance(env.counter, ApproximateCounter):
        return {}
    return {key: count for key, count in env.renderer.counts.known.items() if key not in segments}


def _untrainable(turns: Sequence[Turn]) -> str | None:
    """What is missing in the model calls, if anything is."""
    calls = [call for turn in turns for call in turn.calls]
    if not all(call.output_ids for call in calls):
        return "its model gives no token ids"
    if not all(call.output_logprobs for call in calls):
        return "its outputs have no log probabilities"
    return None


def _versions(call: ModelCall) -> tuple[int, int]:
    return call.policy_version_start, call.policy_version_end


class _Clock:
    """Adds up where the time of an episode went, in milliseconds."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.spent[stage] = round(self.spent.get(stage, 0.0) + (now - self._last) * 1000, 3)
        self._last = now
