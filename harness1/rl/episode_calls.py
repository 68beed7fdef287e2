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
    for call in trained_calls(episode):
        if call.output_ids:
            yield _captured(episode, call)


def _captured(episode: Episode, call: ModelCall) -> CapturedCall:
    return CapturedCall(
        call_id=f"{episode.episode_id}/{call.call_id}",
        prompt_ids=prompt_ids(episode, call),
        output_ids=call.output_ids,
        output_logprobs=call.output_logprobs or None,
        version_start=call.policy_version_start,
        version_end=call.policy_version_end,
        session_id=episode.episode_id,
        finish_reason=call.finish_reason,
        attempt=call.attempt,
    )
