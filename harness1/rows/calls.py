"""The model calls of an episode as training and checks use them: by their tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from harness1.errors import SchemaError
from harness1.records import Episode, ModelCall, Record, Sampling, Status


def calls_of(episode: Episode) -> Iterator[ModelCall]:
    """Yield all calls in order, failed attempts included."""
    for turn in episode.turns:
        yield from turn.calls


def prompt_ids(episode: Episode, call: ModelCall) -> tuple[int, ...]:
    """Return the exact token ids of a call's prompt.

    Raises:
        SchemaError: the episode lacks a segment that the call names.
    """
    outputs = {f"call/{each.call_id}": each.output_ids for each in calls_of(episode)}
    try:
        return tuple(
            token for key in call.prompt for token in (outputs[key] if key in outputs else episode.segments[key])
        )
    except KeyError as error:
        raise SchemaError(f"episode {episode.episode_id} lacks the prompt segment {error}") from error


def trained_calls(episode: Episode) -> Iterator[ModelCall]:
    """Yield the calls that are trained on (none of a broken episode): the last attempt of each turn, which was acted
    on, and all attempts of a turn that ended the episode by a policy error, since the reward is about them."""
    for turn in episode.turns if episode.status is not Status.INFRA_ERROR else ():
        if turn.action is not None:
            yield from turn.calls[-1:]
        elif episode.status is Status.POLICY_ERROR:
            yield from turn.calls


class CapturedCall(Record):
    """A prompt and the output sampled from it, as token ids that were never re-tokenised.

    Raises:
        ValueError: the prompt is empty, or the log probabilities are not finite or not one for each output id.
    """

    call_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[float, ...] | None = None
    """Under the distribution that was sampled from; None if unknown."""
    version_start: int = 0
    """Version of the weights at the first token."""
    version_end: int = 0
    """Version of the weights at the last token."""
    session_id: str = ""
    """The episode."""
    agent_id: str = ""
    """The calling agent of the session, if the client says so."""
    finish_reason: str = ""
    attempt: int = 0
    """Number of times that the same request was sent before, if the client says so."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"call {self.call_id} has no prompt")
        known = self.output_logprobs
        if known is not None and (len(known) != len(self.output_ids) or not all(map(isfinite, known))):
            raise ValueError(f"call {self.call_id} needs one finite log probability for each output id")


class SampledCall(Record):
    """One recorded output with its whole prompt; `version` is that of the weights that sampled it."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    sampling: Sampling
    version: int = 0


def sampled_calls(episode: Episode) -> Iterator[SampledCall]:
    """Yield every call that has log probabilities, failed attempts included, for the replay gate.

    Raises:
        SchemaError: the episode lacks a segment of a prompt.
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
    """Yield the calls that are trained on, as the row builders need them.

    Raises:
        SchemaError: the episode lacks a segment of a prompt.
    """
    failed = {call.call_id for turn in episode.turns if turn.action is None for call in turn.calls}
    for call in trained_calls(episode):
        if call.output_ids:
            yield CapturedCall(
                call_id=f"{episode.episode_id}/{call.call_id}",
                prompt_ids=prompt_ids(episode, call),
                output_ids=call.output_ids,
                output_logprobs=call.output_logprobs or None,
                version_start=call.policy_version_start,
                version_end=call.policy_version_end,
                session_id=episode.episode_id,
                # A failed attempt that is trained on is an agent of its own, not a retry of another.
                agent_id=call.call_id if call.call_id in failed else "",
                finish_reason=call.finish_reason,
                attempt=call.attempt,
            )
