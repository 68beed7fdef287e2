"""Reads rows of Parquet, JSON Lines, JSON arrays and tab-separated files, each with its place, and rows as documents:
BEIR's corpus file, Pyserini's collections, and similar ones. Text files may be gzipped.

A document that was already cut lists its chunks under `_chunks`: a list of `{"chunk_id", "start", "end"}`, in
characters of its text.
"""

from __future__ import annotations

import ast
import codecs
import csv
import gzip
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from harness1.data.apart import ReadApart
from harness1.data.contents import Unreadable
from harness1.data.source import DuplicateId, EmptyText, Fault, Given, Made, drop_repeated, make_each, refuse
from harness1.errors import MALFORMED, CorpusError, optional
from harness1.records import DocId
from harness1.retrieval.corpus import Document, GivenChunk

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
"""Each row with its place, `file:line`, or in Parquet and JSON arrays `file: row N`, from 1."""
LONGEST_LITERAL = 1 << 20
"""Characters of a list written as in Python; parsing takes 200 times as much memory."""
_OBJECT = msgspec.json.Decoder(Row)
ID_KEYS = ("_id", "id", "doc_id")
TEXT_KEYS = ("text", "contents", "content")
CHUNKS_KEY = "_chunks"
LINE_BYTES = 16 << 20
"""Longest line that is read: three times the longest novel. Decoded, it may take 25 times as much memory."""
WHOLE_BYTES = 2 << 30
"""Largest file that is read into memory whole; HotpotQA's is a quarter of it."""
INFLATION, LEAST_INFLATED = 200, 64 << 20
"""How many times its own size a packed file may inflate to, and the bytes that any may; text shrinks by 3 to 20."""
LEAST_PARQUET = 1 << 30
"""The same of Parquet, which keeps what is repeated once."""


def read_documents(path: Path, fault: Fault = refuse) -> Iterator[Document]:
    """Yield the documents of a file: objects with an id (`ID_KEYS`), a text (`TEXT_KEYS`) and perhaps a `title`.
    `fault`: handles a line that is no such object or repeats an id."""
    return distinct_documents(rows([path], fault), document_of_row, fault)


def distinct_documents(
    located: Iterable[tuple[str, Given]], make: Callable[[str, Given], Document], fault: Fault
) -> Iterator[Document]:
    """Yield the document made of the value at each place. Values that make none or repeat an id go to `fault`."""
    documents = drop_repeated(make_each(located, make, fault), lambda document: document.doc_id, fault)
    return (document for _, document in documents)


def numbered_lines(path: Path, fault: Fault = refuse) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a plain or gzipped file, numbered from 1, without the byte order mark that some editors write.
    Raises CorpusError: as for `pieces`; or a line is longer than `LINE_BYTES`, unless `fault` lets it pass."""
    number, begun = 1, False
    for piece in pieces(path):
        ended = piece.endswith(b"\n") or len(piece) < LINE_BYTES
        if ended and not begun:
            yield number, piece.removeprefix(codecs.BOM_UTF8) if number == 1 else piece
        elif not begun:
            fault(CorpusError(f"{path}:{number}: longer than {LINE_BYTES:,} bytes"))
        number, begun = number + ended, not ended


def pieces(path: Path, take: Callable[[IO[bytes]], bytes] = lambda file: file.readline(LINE_BYTES)) -> Iterator[bytes]:
    """Yield a plain or gzipped file in the pieces that `take` reads: lines, longer ones cut at `LINE_BYTES`. Raises
    CorpusError: it cannot be opened or unpacked, or inflates to more than `INFLATION` times its size."""
    if path.exists() and not path.is_file():
        raise CorpusError(f"cannot read {path}: not a regular file")
    is_packed = path.suffix == ".gz"
    left = max(INFLATION * path.stat().st_size, LEAST_INFLATED) if is_packed and path.exists() else sys.maxsize
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            while piece := take(cast("IO[bytes]", file)):
                left -= len(piece)
                if left < 0:
                    raise CorpusError(f"cannot read {path}: it inflates to more than {INFLATION} times its size")
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"cannot read {path}: {error}") from error


def find_file(folder: Path, name: str) -> Path | None:
    """Return `folder/name`, or the same with `.gz`, whichever exists; the plain file comes first."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def identifier(where: str, row: Row, keys: tuple[str, ...] = ID_KEYS) -> str:
    """Return the id of a row: text, or a whole number. Raises CorpusError: the row has no id."""
    value = next((row[key] for key in keys if key in row), None)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise CorpusError(f"{where}: needs an id ({', '.join(keys)}) that is text or a whole number")
    return value


def document_of_row(where: str, row: Row, keys: tuple[str, ...] = ID_KEYS, *, lenient: bool = False) -> Document:
    """Return the document of a row. `keys`: of its id. `lenient`: a text that is missing or null is empty."""
    doc_id, title = identifier(where, row, keys), row.get("title") or ""
    texts = (row[key] for key in TEXT_KEYS if key in row and not (lenient and row[key] is None))
    text = next(texts, "" if lenient else None)
    if not isinstance(text, str):
        raise CorpusError(f"{where}: document {doc_id!r} needs a text ({', '.join(TEXT_KEYS)})")
    if not isinstance(title, str):
        raise CorpusError(f"{where}: the title of document {doc_id!r} is not text")
    if not title.strip() and not text.strip():
        raise EmptyText(f"{where}: document {doc_id!r} has neither title nor text")
    return Document(doc_id=DocId(doc_id), title=title, text=text, chunks=_chunks(where, row.get(CHUNKS_KEY), text))


def _chunks(where: str, value: Any, text: str) -> tuple[GivenChunk, ...]:
    chunks = convert(f"{where}: {CHUNKS_KEY}", value or (), tuple[GivenChunk, ...])
    for chunk in chunks:
        if not 0 <= chunk.start < chunk.end <= len(text):
            raise CorpusError(f"{where}: chunk {chunk.chunk_id!r} lies outside of the text")
    if len({chunk.chunk_id for chunk in chunks}) < len(chunks):
        raise DuplicateId(f"{where}: two of its chunks have one id")
    return chunks


def find_files(root: Path, *patterns: str) -> tuple[Path, ...]:
    """Return the files of the first pattern that matches any below a folder, sorted, or the root if it is a file."""
    if root.is_file():
        return (root,)
    for pattern in patterns:
        if found := sorted(path for path in root.glob(pattern) if path.is_file()):
            return tuple(found)
    return ()


def require_files(root: Path, what: str, *patterns: str) -> tuple[Path, ...]:
    """Return `find_files`, or raise a CorpusError that says what is missing."""
    if found := find_files(root, *patterns):
        return found
    raise CorpusError(f"{root} has no {what}: expected {' or '.join(patterns)}")


def rows(paths: Sequence[Path], fault: Fault = refuse, columns: Sequence[str] = ()) -> Rows:
    """Yield the rows of some files, whose suffix tells the format. `columns`: the needed ones, if the format can
    leave others unread; all if empty. Raises CorpusError: a row is broken, unless `fault` lets it pass, or a file
    is."""
    with ReadApart() as apart:
        for path in paths:
            yield from _rows(path, fault, columns, apart)


def _rows(path: Path, fault: Fault, columns: Sequence[str], apart: ReadApart) -> Rows:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet_rows(path, columns, apart)
    if name.endswith(".jsonl"):
        lines = ((f"{path}:{number}", line) for number, line in numbered_lines(path, fault) if line.strip())
        return make_each(lines, _decode_object, fault)
    if name.endswith(".json"):
        return make_each(_array_items(path), _decode_object, fault)
    if name.endswith(".tsv"):
        return tsv_rows(path, fault)
    raise CorpusError(f"{path}: not a .parquet, .jsonl, .json or .tsv file")


def _parquet_rows(path: Path, columns: Sequence[str], apart: ReadApart) -> Rows:
    with optional("data", "pyarrow"):
        import pyarrow  # noqa: F401
    number = 0
    try:
        most = max(INFLATION * path.stat().st_size, LEAST_PARQUET)
        for number, row in enumerate(chain.from_iterable(apart.rows(path, columns, most)), start=1):
            yield f"{path}: row {number}", row
    except (Unreadable, OSError) as error:
        raise CorpusError(f"{path}: not a whole Parquet file after row {number}: {error}") from error


def _decode_object(where: str, data: bytes | msgspec.Raw) -> Row:
    try:
        return _OBJECT.decode(data)
    except MALFORMED as error:
        raise CorpusError(f"{where}: not a JSON object: {error}") from error


def _array_items(path: Path) -> Iterator[tuple[str, msgspec.Raw]]:
    data = bytearray()
    for piece in pieces(path):
        data += piece
        if len(data) > WHOLE_BYTES:
            raise CorpusError(f"cannot read {path}: larger than {WHOLE_BYTES:,} bytes; write it as JSON Lines")
    try:
        items = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=list[msgspec.Raw])
    except MALFORMED as error:
        raise CorpusError(f"{path}: not a JSON array: {error}") from error
    return ((f"{path}: row {number}", item) for number, item in enumerate(items, start=1))


def tsv_rows(path: Path, fault: Fault = refuse, names: Sequence[str] | None = None) -> Rows:
    """Yield the rows of a tab-separated file, as `csv` writes them; a quote that ends elsewhere is part of the text.
    `names`: of the columns; None if the first row names them."""

    def decode(where: str, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise CorpusError(f"{where}: not UTF-8: {error}") from error

    texts = make_each(((f"{path}:{number}", line) for number, line in numbered_lines(path, fault)), decode, fault)
    for where, text in texts:
        fields = _fields([text], texts)
        if fields is None:
            fault(CorpusError(f"{where}: a quote is opened and never closed"))
        elif names is None:
            names = fields
        elif len(fields) == len(names):
            yield where, dict(zip(names, fields, strict=True))
        elif any(fields):
            fault(CorpusError(f"{where}: {len(fields)} columns where {len(names)} are expected"))


def convert(where: str, value: Any, kind: type[Made]) -> Made:
    """Return a value of a row as a type. Raises CorpusError: it is of another."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise CorpusError(f"{where}: {error}") from error


def text_of(where: str, row: Row, key: str) -> str:
    """Return the text of a row under a key. Raises CorpusError: it is missing, blank or not a text."""
    value = row.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise CorpusError(f"{where}: needs a text under {key}")
    return value


def list_of(where: str, row: Row, *keys: str) -> list[Any]:
    """Return the list of a row under the first of some keys that it has, as a list or written out as JSON or Python."""
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    if isinstance(value, str):
        read = (msgspec.json.decode, ast.literal_eval) if len(value) <= LONGEST_LITERAL else (msgspec.json.decode,)
        for decode in read:
            with suppress(*MALFORMED, SyntaxError, TypeError, MemoryError):
                value = decode(value)
                break
    if not isinstance(value, list):
        raise CorpusError(f"{where}: needs a list under {' or '.join(keys)}")
    return value


def _fields(read: list[str], texts: Iterator[tuple[str, str]]) -> list[str] | None:
    """Return the fields of the row that begins with a line, or None if a quote stays open; the lines in which quoted
    fields go on are moved from `texts` to `read`."""

    def lines() -> Iterator[str]:
        yield read[0]
        left = LINE_BYTES
        for _, text in texts:
            read.append(text)
            left -= len(text)
            if left < 0:
                return
            yield text

    try:
        return next(csv.reader(lines(), "excel-tab", strict=True), [])
    except csv.Error as error:
        return None if "unexpected end" in str(error) else "".join(read).rstrip("\r\n").split("\t")
