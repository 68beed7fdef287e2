"""Reads HTML and PDF in a process of its own, which bounds the time and the memory that one file may take.

Every parser of these formats has inputs of a few kilobytes that keep it busy for hours or fill the memory, and no list
of exceptions covers a library as large as pypdf. Whatever a file does to the process, only that file is lost.
"""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import msgspec

from harness1.data.formats.html import read_html

SECONDS, SECONDS_PER_MIB, MOST_SECONDS = 30.0, 30.0, 300.0
"""Processor time for a file, by its size: honest work is linear in it, at well under a second for each 100 kB."""
MEMORY = 2 << 30
"""Bytes of memory for one file; the largest honest ones take a quarter of it."""
TEXT_BYTES = 32 << 20
"""Largest text of a document, a hundred times a thick book. Longer ones are bombs, logs or data."""

LONGEST_REASON = 200
"""Characters of an error of a parser, which may repeat the file."""


class Unreadable(Exception):
    """The file cannot become a document; the message says why."""


class _Answer(msgspec.Struct):
    title: str = ""
    text: str = ""
    problem: str = ""


class ReadApart:
    """Reads files in another process, which starts with the first one, and again after one that ended it.

    Args:
        share: scales the processor time that a file may take.
        memory: in bytes, for one file.
    """

    def __init__(self, share: float = 1.0, memory: int = MEMORY) -> None:
        self._share, self._memory = share, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def read(self, kind: str, data: bytes) -> tuple[str, str]:
        """Return the title and the text of a file.

        Args:
            kind: html or pdf.

        Raises:
            Unreadable: the file is broken, or takes too much time or memory.
        """
        seconds = self._share * min(SECONDS + SECONDS_PER_MIB * len(data) / (1 << 20), MOST_SECONDS)
        line = self._line or self._begin()
        try:
            line.send_bytes(msgspec.msgpack.encode((kind, seconds)))
            line.send_bytes(data)
            answer = msgspec.msgpack.decode(line.recv_bytes(), type=_Answer)
        except (EOFError, OSError) as error:
            self._end()
            raise Unreadable(f"reading it takes more than {seconds:.0f} s or fails within its parser") from error
        if answer.problem:
            raise Unreadable(answer.problem)
        return answer.title, answer.text

    def _begin(self) -> Connection:
        self._line, theirs = Pipe()
        # A module started by its name would be looked for in the current folder.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve(*map(int, sys.argv[1:]))"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(self._memory)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # parsers complain there about what they could mend
                start_new_session=True,  # an interrupt is for the command alone
            )
        return self._line

    def _end(self) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.kill()
            self._process.wait()
        self._line = self._process = None


def serve(descriptor: int, memory: int) -> None:
    """Answer with the content of files until the connection is closed, within the memory. A file that takes more than
    its time ends the process, even if nobody is left to wait for it."""
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
            _limit_time(seconds)
            line.send_bytes(msgspec.msgpack.encode(_answer(kind, data)))


def _limit_time(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))


def _answer(kind: str, data: bytes) -> _Answer:
    try:
        title, text = READERS[kind](data)
    except Unreadable as error:
        return _Answer(problem=str(error))
    except MemoryError:
        return _Answer(problem="reading it takes too much memory")
    if len(title) + len(text) > TEXT_BYTES:
        return _Answer(problem=f"its text has more than {TEXT_BYTES:,} characters")
    return _Answer(title, text)


def _read_html(data: bytes) -> tuple[str, str]:
    return read_html(data.decode())


def _read_pdf(data: bytes) -> tuple[str, str]:
    """Return title and text of a PDF. Its reader fails on broken files in many ways, each of which concerns this file
    alone."""
    import pypdf
    import pypdf.errors

    pages, left = [], TEXT_BYTES
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        for page in reader.pages:
            pages.append(page.extract_text())
            left -= len(pages[-1])
            if left < 0:
                break
        title = str((reader.metadata and reader.metadata.title) or "")
    except (
        *(pypdf.errors.PyPdfError, pypdf.errors.DependencyError, pypdf.errors.DeprecationError, zlib.error),
        *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
        *(NotImplementedError, RecursionError),
    ) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unreadable(f"broken or locked PDF ({why[:LONGEST_REASON]})") from error
    # Broken fonts yield halves of surrogate pairs, which no UTF-8 file can hold.
    return title.encode("utf-8", "ignore").decode(), "\n\n".join(pages).encode("utf-8", "ignore").decode()


READERS: Mapping[str, Callable[[bytes], tuple[str, str]]] = {"html": _read_html, "pdf": _read_pdf}
