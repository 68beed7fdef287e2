"""Reads what could harm its reader in a process of its own, within bounds of time and memory: all but plain text.

Parsers of these formats have inputs of a few kilobytes that keep them busy for hours, fill the memory, or end the
process. Whatever a file does to the process, only it is lost.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from harness1.data.contents import LONGEST_REASON, Contents, Unreadable
from harness1.data.formats import read_file
from harness1.errors import MALFORMED, UsageError

SECONDS, SECONDS_PER_MIB, MOST_SECONDS = 30.0, 30.0, 300.0
"""Processor time for a file, by its size: honest work is linear in it, at well under a second for each 100 kB."""
MEMORY = 2 << 30  # bytes of memory for one file; the largest honest ones take a quarter of it


Found = TypeVar("Found")


def start_apart(module: str, *given: int, **streams: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start `serve(DESCRIPTOR, *given)` of a module in a process that no interrupt reaches; return it with our end
    of its line."""
    ours, theirs = Pipe()
    # A module started by its name would be looked for in the current folder.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import serve; serve(*map(int, sys.argv[1:]))"
    with theirs:
        words = [sys.executable, "-c", code, *map(str, (theirs.fileno(), *given))]
        kept: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, **streams}
        return subprocess.Popen(words, pass_fds=[theirs.fileno()], **kept), ours


class ReadApart:
    """Reads files in another process, begun again after one that ended it. `share`: scales the time for a file."""

    def __init__(self, share: float = 1.0, memory: int = MEMORY) -> None:
        self._share, self._memory = share, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def read(self, ending: str, data: bytes) -> Contents:
        """Return what a file holds whose name ends so. Raises Unreadable: it is broken, or takes too much."""
        seconds = min(SECONDS + SECONDS_PER_MIB * len(data) / (1 << 20), MOST_SECONDS)
        [found] = self._answers(ending, data, seconds, Contents)
        return found

    def rows(self, path: Path, columns: Sequence[str], most: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of a Parquet file, some at a time; more than `most` bytes of them are Unreadable."""
        data = msgspec.msgpack.encode((os.fsencode(path), columns, most))
        return self._answers("parquet", data, SECONDS + path.stat().st_size / (1 << 20), list[dict[str, Any]])

    def _answers(self, kind: str, data: bytes, seconds: float, of: type[Found]) -> Iterator[Found]:
        line, seconds = self._line or self._begin(), self._share * seconds
        answer: Any = tuple[of | None, str]  # type: ignore[valid-type]
        try:
            line.send_bytes(msgspec.msgpack.encode((kind, seconds)))
            line.send_bytes(data)
            while (found := msgspec.msgpack.decode(line.recv_bytes(), type=answer))[0] is not None:
                yield found[0]
        except (EOFError, OSError, *MALFORMED) as error:
            self._end()
            raise Unreadable(f"reading it takes more than {seconds:.0f} s or fails within its parser") from error
        if found[1]:
            raise Unreadable(found[1])

    def _begin(self) -> Connection:
        nowhere = subprocess.DEVNULL  # parsers complain there about what they could mend
        self._process, self._line = start_apart(__name__, self._memory, stdout=nowhere, stderr=nowhere)
        return self._line

    def _end(self) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.kill()
            self._process.wait()
        self._line = self._process = None


def serve(descriptor: int, memory: int) -> None:
    """Answer with the content of files until the connection is closed; one that takes too long ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError):  # macOS has no such limit, and a lower one is there to stay
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with Connection(descriptor) as line:
        while True:
            try:
                kind, seconds = msgspec.msgpack.decode(line.recv_bytes(), type=tuple[str, float])
                data = line.recv_bytes()
            except EOFError:
                return
            used = resource.getrusage(resource.RUSAGE_SELF)
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))
            for answer in _answers(kind, data):
                line.send_bytes(answer)


_PACK = msgspec.msgpack.Encoder(enc_hook=str)


def _answers(kind: str, data: bytes) -> Iterator[bytes]:
    """Yield what is found in a file, part by part, and at the end why it goes no further, "" if it is whole."""
    problem = ""
    try:
        yield from _read_rows(data) if kind == "parquet" else [_PACK.encode((read_file(kind, data), ""))]
    except (Unreadable, UsageError) as error:
        problem = str(error)
    except MemoryError:
        problem = "reading it takes too much memory"
    yield _PACK.encode((None, problem))


BATCH, BUFFER = 64, 1 << 20
"""Rows of a Parquet file that are decoded at once, and bytes of a column that are read at once."""


def _read_rows(data: bytes) -> Iterator[bytes]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the others reserve more addresses than they use
    size, (path, columns, most) = 0, msgspec.msgpack.decode(data, type=tuple[bytes, list[str], int])
    try:
        with ParquetFile(os.fsdecode(path), buffer_size=BUFFER, pre_buffer=False) as file:
            wanted = [name for name in file.schema_arrow.names if name in columns] if columns else None
            for batch in file.iter_batches(BATCH, columns=wanted, use_threads=False):
                packed = _PACK.encode((batch.to_pylist(), ""))
                size += len(packed)
                if size > most:
                    raise Unreadable(f"it inflates to more than {most:,} bytes")
                yield packed
    except MemoryError:  # pyarrow's own is an ArrowException, too
        raise
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        raise Unreadable(" ".join(str(error).split())[:LONGEST_REASON]) from error
