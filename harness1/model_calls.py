"""The model calls of an episode: their prompts put together again, and those of them that are trained on."""

from __future__ import annotations

from collections.abc import Iterator

from harness1.errors import SchemaError
from harness1.records import Episode, ModelCall, Status


def calls_of(episode: Episode) -> Iterator[ModelCall]:
    """All calls, failed attempts included, in the order made."""
    for turn in episode.turns:
        yield from turn.calls


def prompt_ids(episode: Episode, call: ModelCall) -> tuple[int, ...]:
    """The token ids that a call was given, exactly.

    Raises:
        SchemaError: the episode does not hold a stretch that the call names.
    """
    outputs = {f"call/{each.call_id}": each.output_ids for each in calls_of(episode)}
    try:
        return tuple(
            token for key in call.prompt for token in (outputs[key] if key in outputs else episode.segments[key])
        )
    except KeyError as error:
        raise SchemaError(f"episode {episode.episode_id} lacks the prompt segment {error}") from error


def trained_calls(episode: Episode) -> Iterator[ModelCall]:
    """The calls that an episode is trained on: of each turn the last attempt, which was acted on; and the failed ones
    of the turn that ended an episode by its policy's error, for there they are what the reward is about. None of an
    episode that the infrastructure broke."""
    for turn in episode.turns if episode.status is not Status.INFRA_ERROR else ():
        if turn.action is not None:
            yield from turn.calls[-1:]
        elif episode.status is Status.POLICY_ERROR:
            yield from turn.calls
