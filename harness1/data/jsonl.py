"""Documents as JSON Lines, plain or gzipped: BEIR's corpus file, Pyserini's collections, and similar ones.

A document that was already cut lists its chunks under `_chunks`: a list of `{"chunk_id", "start", "end"}`, in
characters of its text.
"""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness1.data.source import DuplicateId, EmptyText, Fault, Given, Made, drop_repeated, make_each, refuse
from harness1.errors import MALFORMED, CorpusError
from harness1.records import DocId
from harness1.retrieval.corpus import Document, GivenChunk

ID_KEYS = ("_id", "id", "doc_id")
TEXT_KEYS = ("text", "contents", "content")
CHUNKS_KEY = "_chunks"
LINE_BYTES = 16 << 20
"""Longest line that is read: three times the longest novel. Decoded, it may take 25 times as much memory."""
WHOLE_BYTES = 2 << 30
"""Largest file that is read into memory whole; HotpotQA's is a quarter of it."""
INFLATION, LEAST_INFLATED = 200, 64 << 20
"""How many times its own size a gzipped file may inflate to, and the bytes that any may; text shrinks by 3 to 20."""


def read(path: Path, fault: Fault = refuse) -> Iterator[Document]:
    """Yield the documents of a file: objects with an id (`ID_KEYS`), a text (`TEXT_KEYS`) and perhaps a `title`, one of
    which is not empty. `fault`: handles a line that is no such object or repeats an id. Raises
    CorpusError: there is such a line, unless `fault` lets it pass, or the file cannot be read."""
    return distinct_documents(rows(path, fault), _document, fault)


def distinct_documents(
    located: Iterable[tuple[str, Given]], make: Callable[[str, Given], Document], fault: Fault
) -> Iterator[Document]:
    """Yield the document made of the value at each place. Values that make none or repeat an id go to `fault`."""
    documents = drop_repeated(make_each(located, make, fault), lambda document: document.doc_id, fault)
    return (document for _, document in documents)


def rows(path: Path, fault: Fault = refuse) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a file, each with its place as `file:line`. Raises CorpusError: a line is not a JSON
    object, unless `fault` lets it pass, or the file cannot be read."""
    return decode_lines(path, dict[str, Any], "a JSON object", fault)


def decode_lines(path: Path, type_: type[Made], what: str, fault: Fault) -> Iterator[tuple[str, Made]]:
    """Yield the lines of a file as values of a type, like `rows`; an error says that a line is not `what`."""
    decoder = msgspec.json.Decoder(type_)

    def decode(where: str, line: bytes) -> Made:
        try:
            return decoder.decode(line)
        except MALFORMED as error:
            raise CorpusError(f"{where}: not {what}: {error}") from error

    lines = ((f"{path}:{number}", line) for number, line in numbered_lines(path, fault) if line.strip())
    return make_each(lines, decode, fault)


def numbered_lines(path: Path, fault: Fault = refuse) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a plain or gzipped file, numbered from 1, without the byte order mark that some editors write.
    Raises CorpusError: the file cannot be opened or unpacked, or inflates to more than `INFLATION` times its size; or a
    line is longer than `LINE_BYTES`, unless `fault` lets it pass."""
    number, begun = 1, False
    for piece in _pieces(path):
        ended = piece.endswith(b"\n") or len(piece) < LINE_BYTES
        if ended and not begun:
            yield number, piece.removeprefix(codecs.BOM_UTF8) if number == 1 else piece
        elif not begun:
            fault(CorpusError(f"{path}:{number}: longer than {LINE_BYTES:,} bytes"))
        number, begun = number + ended, not ended


def content(path: Path) -> bytes:
    """Return a plain or gzipped file whole, without the byte order mark. Raises CorpusError: as for `numbered_lines`;
    or it is larger than `WHOLE_BYTES`."""
    found = bytearray()
    for piece in _pieces(path):
        found += piece
        if len(found) > WHOLE_BYTES:
            raise CorpusError(f"cannot read {path}: larger than {WHOLE_BYTES:,} bytes; write it as JSON Lines")
    return bytes(found.removeprefix(codecs.BOM_UTF8))


def _pieces(path: Path) -> Iterator[bytes]:
    if path.exists() and not path.is_file():
        raise CorpusError(f"cannot read {path}: not a regular file")
    is_packed = path.suffix == ".gz"
    left = max(INFLATION * path.stat().st_size, LEAST_INFLATED) if is_packed and path.exists() else sys.maxsize
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            while piece := file.readline(LINE_BYTES):
                left -= len(piece)
                if left < 0:
                    raise CorpusError(f"cannot read {path}: it inflates to more than {INFLATION} times its size")
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"cannot read {path}: {error}") from error


def find_file(folder: Path, name: str) -> Path | None:
    """Return `folder/name`, or the same with `.gz`, whichever exists; the plain file comes first."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def identifier(where: str, row: dict[str, Any], keys: tuple[str, ...] = ID_KEYS) -> str:
    """Return the id of a row: text, or a whole number. Raises CorpusError: the row has no id."""
    value = next((row[key] for key in keys if key in row), None)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise CorpusError(f"{where}: needs an id ({', '.join(keys)}) that is text or a whole number")
    return value


def _document(where: str, row: dict[str, Any]) -> Document:
    doc_id = identifier(where, row)
    title = row.get("title") or ""
    text = next((row[key] for key in TEXT_KEYS if key in row), None)
    if not isinstance(text, str):
        raise CorpusError(f"{where}: document {doc_id!r} needs a text ({', '.join(TEXT_KEYS)})")
    if not isinstance(title, str):
        raise CorpusError(f"{where}: the title of document {doc_id!r} is not text")
    if not title.strip() and not text.strip():
        raise EmptyText(f"{where}: document {doc_id!r} has neither title nor text")
    return Document(doc_id=DocId(doc_id), title=title, text=text, chunks=_chunks(where, row.get(CHUNKS_KEY), text))


def _chunks(where: str, value: Any, text: str) -> tuple[GivenChunk, ...]:
    try:
        chunks = msgspec.convert(value or (), tuple[GivenChunk, ...])
    except msgspec.ValidationError as error:
        raise CorpusError(f"{where}: {CHUNKS_KEY}: {error}") from error
    for chunk in chunks:
        if not 0 <= chunk.start < chunk.end <= len(text):
            raise CorpusError(f"{where}: chunk {chunk.chunk_id!r} lies outside of the text")
    if len({chunk.chunk_id for chunk in chunks}) < len(chunks):
        raise DuplicateId(f"{where}: two of its chunks have one id")
    return chunks
