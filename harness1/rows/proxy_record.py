"""The record of calls: a line each in `calls.jsonl`, with token ids and log probabilities in `tokens.bin`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from harness1.errors import MALFORMED, SchemaError
from harness1.records import Record, Sampling, TokenBlob, ToolCall
from harness1.rows.calls import CapturedCall
from harness1.runs.files import Stage, refuse_changed, refuse_foreign
from harness1.runs.journal import Journal, checked_lines, read_lines, to_bytes, unpacked, with_digest

CALLS = "calls.jsonl"
TOKENS = "tokens.bin"
VERB = "proxy"
ABANDONED = 499
"""Recorded status of a call whose client left before the answer; it is never sent."""


class RecordedCall(Record, kw_only=True):
    """One call that passed the proxy, answered or not. Times are in seconds since 1970."""

    call_id: str
    session_id: str
    dialect: str
    agent_id: str = ""
    attempt: int = 0
    t_arrived: float = 0.0
    t_start: float = 0.0
    """Time at which the upstream was called; 0 if it was not."""
    t_end: float = 0.0
    model: str = ""
    """The name that the client gave."""
    status: int = 0
    error: str | None = None
    untrainable: str | None = None
    """The reason why an answered call cannot be trained on."""
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[float, ...] | None = None
    """Natural logarithms, one for each output id; None if unknown."""
    sampling: Sampling | None = None
    version_start: int = 0
    version_end: int = 0
    finish_reason: str = ""
    actions: tuple[ToolCall, ...] = ()
    request: dict[str, Any] | None = None
    """The forwarded body, with the returned message in `reply`; kept if there are no ids."""
    reply: dict[str, Any] | None = None
    tokens: TokenBlob | None = None
    """The place of ids and log probabilities on disk; None once they are read."""

    def captured(self) -> CapturedCall | None:
        """Return the call for training rows, or None if it cannot be trained on."""
        if self.error is not None or self.untrainable is not None or self.output_logprobs is None:
            return None
        return CapturedCall(
            call_id=self.call_id,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            output_logprobs=self.output_logprobs,
            version_start=self.version_start,
            version_end=self.version_end,
            session_id=self.session_id,
            agent_id=self.agent_id,
            finish_reason=self.finish_reason,
            attempt=self.attempt,
        )


class Recorder(Journal):
    """Append calls to a folder, which one process at a time may write. `count` is the number of appended calls.

    Raises:
        UsageError: another process is writing to the folder, or it is not writable.
    """

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
    """Open the recorder of a folder, and write at the end in its card (`stage.json`) if the end was a clean one.

    Args:
        inputs: everything that determines the answers. A folder accepts only further calls with the same inputs.

    Raises:
        UsageError: the folder holds something else, another process writes to it, or it is not writable.
    """
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
    """Yield every call of a folder, including failed ones, in the order in which they ended.

    Args:
        on_torn: called with the size in bytes of a torn last line, which is left out.

    Raises:
        UsageError: the folder holds no calls.
        SchemaError: a line is not a call, or was changed, or its tokens are damaged.
    """
    path = run / CALLS
    for number, line in checked_lines(path, read_lines(path, on_torn)):
        try:
            yield _with_tokens(msgspec.json.decode(line, type=RecordedCall), run)
        except (*MALFORMED, SchemaError) as error:
            raise SchemaError(f"{path}:{number}: {error}") from error


def read_calls(run: Path) -> Iterator[CapturedCall]:
    """Yield the calls for training rows (`per_request`, `prefix_merging`); raise as `read_records` does."""
    captured = (call.captured() for call in read_records(run))
    return (call for call in captured if call is not None)


def _with_tokens(call: RecordedCall, run: Path) -> RecordedCall:
    if call.tokens is None:
        return call
    prompt, output, logprobs = unpacked(run / TOKENS, call.tokens, f"call {call.call_id}")
    return msgspec.structs.replace(
        call,
        prompt_ids=tuple(prompt.view("<i4").tolist()),
        output_ids=tuple(output.view("<i4").tolist()),
        output_logprobs=None if call.output_logprobs is None else tuple(logprobs.view("<f4").tolist()),
        tokens=None,
    )
