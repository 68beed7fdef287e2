"""The model calls of an episode as training and checks use them: by their tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from harness1.errors import MALFORMED, SchemaError
from harness1.records import Episode, ModelCall, Record, Sampling, Status, TokenBlob, ToolCall
from harness1.runs.files import Stage, refuse_changed, refuse_foreign
from harness1.runs.journal import Journal, check_lines, read_lines, to_bytes, unpack, with_digest


def calls_of(episode: Episode) -> Iterator[ModelCall]:
    """Yield all calls in order, failed attempts included."""
    for turn in episode.turns:
        yield from turn.calls


def prompt_ids(episode: Episode, call: ModelCall) -> tuple[int, ...]:
    """Return the exact token ids of a call's prompt; SchemaError if the episode lacks a segment of it."""
    known = episode.segments | {f"call/{each.call_id}": each.output_ids for each in calls_of(episode)}
    try:
        return tuple(chain.from_iterable([known[key] for key in call.prompt]))
    except KeyError as error:
        raise SchemaError(f"episode {episode.episode_id} lacks the prompt segment {error}") from error


def calls_to_train(episode: Episode) -> Iterator[ModelCall]:
    """Yield the calls that are trained on (none of a broken episode): the last attempt of each turn, which was acted
    on, and all attempts of a turn that ended the episode by a policy error, since the reward is about them."""
    for turn in episode.turns if episode.status is not Status.INFRA_ERROR else ():
        if turn.action is not None:
            yield from turn.calls[-1:]
        elif episode.status is Status.POLICY_ERROR:
            yield from turn.calls


class CapturedCall(Record):
    """A prompt and the output sampled from it, as token ids that were never re-tokenised; raises ValueError if there is
    no prompt, or not one finite log probability for each output id."""

    call_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[float, ...] | None = None  # under the distribution that was sampled from; None if unknown
    version_start: int = 0  # of the weights at the first token
    version_end: int = 0  # and at the last
    session_id: str = ""  # the episode
    agent_id: str = ""
    finish_reason: str = ""
    attempt: int = 0  # number of times that the same request was sent before

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"call {self.call_id} has no prompt")
        known = self.output_logprobs
        if known is not None and (len(known) != len(self.output_ids) or not all(map(isfinite, known))):
            raise ValueError(f"call {self.call_id} needs one finite log probability for each output id")


def calls_for_rows(episode: Episode) -> Iterator[CapturedCall]:
    """Yield the calls that are trained on, as the row builders need them."""
    failed = {call.call_id for turn in episode.turns if turn.action is None for call in turn.calls}
    for call in calls_to_train(episode):
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


CALLS, TOKENS, VERB = "calls.jsonl", "tokens.bin", "proxy"
ABANDONED = 499  # recorded status of a call whose client left before the answer; it is never sent


class RecordedCall(Record, kw_only=True):
    """One call that passed the proxy, answered or not. Times are in seconds since 1970; `t_start` is that at which the
    upstream was called, 0 if it was not. Bodies are kept if there are no ids: `reply` is the returned message."""

    call_id: str
    session_id: str
    dialect: str
    agent_id: str = ""
    attempt: int = 0
    t_arrived: float = 0.0
    t_start: float = 0.0
    t_end: float = 0.0
    model: str = ""  # the name that the client gave
    status: int = 0
    error: str | None = None
    untrainable: str | None = None  # why an answered call cannot be trained on
    unmet: dict[str, Any] = {}  # what the client asked for that was not done, by name: `max_tokens` beyond the window
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[float, ...] | None = None
    sampling: Sampling | None = None
    version_start: int = 0
    version_end: int = 0
    finish_reason: str = ""
    actions: tuple[ToolCall, ...] = ()
    request: dict[str, Any] | None = None
    reply: dict[str, Any] | None = None
    tokens: TokenBlob | None = None  # the place of ids and log probabilities on disk; None once they are read

    def as_call(self) -> CapturedCall | None:
        """Return the call for training rows, or None if it cannot be trained on."""
        if self.error is not None or self.untrainable is not None or self.output_logprobs is None:
            return None
        return CapturedCall(**{name: getattr(self, name) for name in CapturedCall.__struct_fields__})


class Recorder(Journal):
    """Append calls to a folder, which one process at a time may write; UsageError as `Journal`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, CALLS, TOKENS)
        self.count = 0

    def append(self, call: RecordedCall) -> None:
        """Write a finished call; raise OSError if that fails."""
        columns = ((call.prompt_ids, "<i4"), (call.output_ids, "<i4"), (call.output_logprobs or (), "<f4"))
        arrays = tuple(np.asarray(values, dtype=kind) for values, kind in columns)
        blob, place = to_bytes(arrays, self.offset)
        known = None if call.output_logprobs is None else ()
        bare = msgspec.structs.replace(call, prompt_ids=(), output_ids=(), output_logprobs=known, tokens=place)
        self.write(with_digest(msgspec.json.encode(bare)), blob)
        self.count += 1


@contextmanager
def recording(folder: Path, inputs: dict[str, Any]) -> Iterator[Recorder]:
    """Open the recorder of a folder, and write at the end in its card (`stage.json`) if the end was a clean one. Raises
    UsageError: it holds something else, or calls with other `inputs`, which determine the answers; or as `Journal`."""
    stage = Stage(VERB, msgspec.to_builtins(inputs))
    refuse_foreign(folder, VERB, "no record of a proxy", CALLS, "--record")
    refuse_changed(stage, folder, "record of a proxy", "--record")
    with Recorder(folder) as recorder:
        ended: Literal["finished", "interrupted"] = "interrupted"
        stage.write(folder)
        try:
            yield recorder
            ended = "finished"
        finally:
            stage.write(folder, status=ended, outputs={"calls": recorder.count})


def read_records(run: Path, on_torn: Callable[[int], None] | None = None) -> Iterator[RecordedCall]:
    """Yield every call of a folder, including failed ones, in the order in which they ended; `on_torn` as in
    `read_lines`. Raises SchemaError: a line is not a call, or was changed, or its tokens are damaged."""
    path = run / CALLS
    for number, line in check_lines(path, read_lines(path, on_torn)):
        try:
            call = msgspec.json.decode(line, type=RecordedCall)
            if call.tokens is not None:
                prompt, output, logprobs = unpack(run / TOKENS, call.tokens, f"call {call.call_id}")
                call = msgspec.structs.replace(
                    call,
                    prompt_ids=tuple(prompt.view("<i4").tolist()),
                    output_ids=tuple(output.view("<i4").tolist()),
                    output_logprobs=None if call.output_logprobs is None else tuple(logprobs.view("<f4").tolist()),
                    tokens=None,
                )
            yield call
        except (*MALFORMED, SchemaError) as error:
            raise SchemaError(f"{path}:{number}: {error}") from error


def read_calls(run: Path) -> Iterator[CapturedCall]:
    """Yield the calls for training rows (`per_request`, `prefix_merging`); raise as `read_records` does."""
    return (found for call in read_records(run) if (found := call.as_call()) is not None)
