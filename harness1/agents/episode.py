"""The session of an agent as an episode: each answered call is a turn, so that rows are made as of any other."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.agents.evaluation import AgentSession
from harness1.episodes.jobs import EpisodeJob
from harness1.hashing import digest
from harness1.records import (
    Episode,
    Hashes,
    ModelCall,
    RewardRecord,
    Sampling,
    Status,
    StopReason,
    ToolCall,
    Turn,
)
from harness1.rows.proxy_record import RecordedCall

SAID = ToolCall("message")
"""The action of a call without a tool call: its text is the answer."""
BROKEN = frozenset((500, 502, 503, 504))
"""Statuses of calls that the infrastructure failed."""


def fault_of(session: AgentSession) -> str:
    """Return what the infrastructure did to a session; empty if nothing. A session without a single answered call says
    nothing about the policy, so it counts as broken too."""
    for call in session.calls:
        if call.status in BROKEN:
            return f"a call failed: {call.error}"
    if any(call.captured() for call in session.calls):
        return ""
    refused = next((call.error or call.untrainable for call in session.calls if call.error or call.untrainable), None)
    last = session.output.strip().rpartition("\n")[2][-200:]
    return f"the agent made no call that can be trained on (exit {session.exit_code}): {refused or last or 'no output'}"


def episode_of(job: EpisodeJob, session: AgentSession, reward: RewardRecord, hashes: Hashes) -> Episode:
    """Return the episode of a session that is not broken."""
    answered = [call for call in session.calls if call.captured() is not None]
    segments: dict[str, tuple[int, ...]] = {}
    prompts = _prompts(answered, segments)
    turns = [
        Turn(
            index=place,
            calls=(_call(call, prompt),),
            action=call.actions[0] if call.actions else SAID,
            ignored=call.actions[1:],
            prompt_tokens=len(call.prompt_ids),
        )
        for place, (call, prompt) in enumerate(zip(answered, prompts, strict=True), start=1)
    ]
    versions = [version for call in answered for version in (call.version_start, call.version_end)]
    return Episode(
        episode_id=digest([job.task.public(), job.sample_idx, job.seed, hashes, session.name])[:16],
        task=job.task.public(),
        sample_idx=job.sample_idx,
        group_id=job.group_id,
        seed=job.seed,
        turns=tuple(turns),
        stop_reason=StopReason.TURN_LIMIT if session.cut else StopReason.END_SEARCH,
        status=Status.COMPLETED,
        reward=reward,
        hashes=hashes,
        policy_versions=(min(versions), max(versions)),
        segments=segments,
    )


def _prompts(calls: Sequence[RecordedCall], segments: dict[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Return the prompts as keys. One that continues an earlier prompt and its output stores what is new alone."""
    made: list[tuple[str, ...]] = []
    for place, call in enumerate(calls):
        keys: tuple[str, ...] = ()
        begin = 0
        for earlier in range(place - 1, -1, -1):
            before = (*calls[earlier].prompt_ids, *calls[earlier].output_ids)
            if call.prompt_ids[: len(before)] == before:
                keys, begin = (*made[earlier], f"call/{calls[earlier].call_id}"), len(before)
                break
        name = f"prompt/{call.call_id}"
        segments[name] = call.prompt_ids[begin:]
        made.append((*keys, name))
    return made


def _call(call: RecordedCall, prompt: tuple[str, ...]) -> ModelCall:
    return ModelCall(
        call_id=call.call_id,
        attempt=call.attempt,
        prompt=prompt,
        output_ids=call.output_ids,
        output_logprobs=call.output_logprobs or (),
        sampling=call.sampling or Sampling(),
        policy_version_start=call.version_start,
        policy_version_end=call.version_end,
        finish_reason=call.finish_reason,
        t_start=call.t_start,
        t_end=call.t_end,
    )
