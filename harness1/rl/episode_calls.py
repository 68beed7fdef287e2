"""The model calls of an episode as training and checking take them: by their tokens alone."""

from __future__ import annotations

from collections.abc import Iterator

from harness1.model_calls import calls_of, prompt_ids, trained_calls
from harness1.records import Episode, ModelCall
from harness1.rl.captured_call import CapturedCall
from harness1.rl.sampled_call import SampledCall


def sampled_calls(episode: Episode) -> Iterator[SampledCall]:
    """Every call that has its log probabilities, failed attempts included: what the replay gate looks at.

    Raises:
        SchemaError: the episode does not hold a stretch of a prompt.
    """
    for call in calls_of(episode):
        if call.output_logprobs:
            yield SampledCall(
                prompt_ids(episode, call),
                call.output_ids,
                call.output_logprobs,
                call.sampling,
                call.policy_version_start,
            )


def captured_calls(episode: Episode) -> Iterator[CapturedCall]:
    """The calls that are trained on, as the row builders take them.

    Raises:
        SchemaError: the episode does not hold a stretch of a prompt.
    """
    failed = {call.call_id for turn in episode.turns if turn.action is None for call in turn.calls}
    for call in trained_calls(episode):
        if call.output_ids:
            yield _captured(episode, call, call.call_id if call.call_id in failed else "")


def _captured(episode: Episode, call: ModelCall, agent_id: str) -> CapturedCall:
    """Failed attempts that are trained on are all meant, so that none may pass for a retry of another: each counts as
    an agent of its own."""
    return CapturedCall(
        call_id=f"{episode.episode_id}/{call.call_id}",
        prompt_ids=prompt_ids(episode, call),
        output_ids=call.output_ids,
        output_logprobs=call.output_logprobs or None,
        version_start=call.policy_version_start,
        version_end=call.policy_version_end,
        session_id=episode.episode_id,
        agent_id=agent_id,
        finish_reason=call.finish_reason,
        attempt=call.attempt,
    )
