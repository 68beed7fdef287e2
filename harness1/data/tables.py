"""Reads rows of Parquet, JSON Lines, JSON arrays and tab-separated files, each with its place."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from harness1.data import jsonl
from harness1.data.source import Fault, refuse
from harness1.errors import MALFORMED, CorpusError, MissingExtra

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
"""Each row with its place, `file:line` or, in Parquet, `file: row N`, both from 1."""
LONGEST_LITERAL = 1 << 20
"""Characters of a list written as in Python; parsing takes 200 times as much memory."""
BATCH = 256
"""Rows of a Parquet file held at once."""


def find_files(root: Path, *patterns: str) -> tuple[Path, ...]:
    """Return the files of the first pattern that matches any below a folder, sorted, or the root itself if it is a
    file."""
    if root.is_file():
        return (root,)
    for pattern in patterns:
        if found := sorted(path for path in root.glob(pattern) if path.is_file()):
            return tuple(found)
    return ()


def require_files(root: Path, what: str, *patterns: str) -> tuple[Path, ...]:
    """Return `find_files`, or raise an error that says what is missing. Raises CorpusError: no pattern matches."""
    found = find_files(root, *patterns)
    if not found:
        raise CorpusError(f"{root} has no {what}: expected {' or '.join(patterns)}")
    return found


def rows(paths: Sequence[Path], fault: Fault = refuse, columns: Sequence[str] = ()) -> Rows:
    """Yield the rows of some files, whose suffix tells the format. `columns`: the needed ones, if the format can leave
    others unread; all if empty. Raises CorpusError: a row is malformed, unless `fault` lets it pass; or a file is
    broken or of no known kind; MissingExtra: pyarrow is needed and not installed."""
    return chain.from_iterable(_rows(path, fault, columns) for path in paths)


def _rows(path: Path, fault: Fault, columns: Sequence[str]) -> Rows:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet_rows(path, columns)
    if name.endswith(".jsonl"):
        return jsonl.rows(path, fault)
    if name.endswith(".json"):
        return _json_rows(path, fault)
    if name.endswith(".tsv"):
        return tsv_rows(path, fault)
    raise CorpusError(f"{path}: not a .parquet, .jsonl, .json or .tsv file")


def _parquet_rows(path: Path, columns: Sequence[str]) -> Rows:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name in columns] if columns else None
            for batch in file.iter_batches(BATCH, columns=wanted):
                for number, row in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020
                    yield f"{path}: row {number}", row
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: not a whole Parquet file after row {number}: {error}") from error


def _json_rows(path: Path, fault: Fault) -> Rows:
    data = jsonl.content(path)
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except MALFORMED as error:
        place = str(error).rpartition("(byte ")[2].rstrip(")")
        line = 1 + data.count(b"\n", 0, int(place) if place.isdigit() else len(data))
        raise CorpusError(f"{path}:{line}: not a JSON array: {error}") from error
    at, line = 0, 1
    for number, item in enumerate(items, start=1):
        start = data.index(bytes(item), at)
        line += data.count(b"\n", at, start)
        at = start
        where = f"{path}:{line} (item {number})"
        try:
            yield where, msgspec.json.decode(item, type=Row)
        except MALFORMED as error:
            fault(CorpusError(f"{where}: not a JSON object: {error}"))


def tsv_rows(path: Path, fault: Fault = refuse, names: Sequence[str] | None = None) -> Rows:
    """Yield the rows of a tab-separated file. A field in quotes may hold tabs and line breaks, as `csv` writes them; a
    quote that ends elsewhere is part of the text. `names`: of the columns; None if the first row names them."""
    texts = _texts(path, fault)
    for number, text in texts:
        where, fields = f"{path}:{number}", _fields([text], texts)
        if fields is None:
            fault(CorpusError(f"{where}: a quote is opened and never closed"))
        elif names is None:
            names = fields
        elif len(fields) == len(names):
            yield where, dict(zip(names, fields, strict=True))
        elif any(fields):
            fault(CorpusError(f"{where}: {len(fields)} columns where {len(names)} are expected"))


def text_of(where: str, row: Row, *keys: str) -> str:
    """Return the text of a row under the first of some keys that it has. Raises CorpusError: it is missing, blank or
    not a text."""
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise CorpusError(f"{where}: needs a text under {' or '.join(keys)}")
    return value


def list_of(where: str, row: Row, *keys: str) -> list[Any]:
    """Return the list of a row under the first of some keys that it has, as a list or written out as JSON or Python.
    Raises CorpusError: there is no list."""
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


def _texts(path: Path, fault: Fault) -> Iterator[tuple[int, str]]:
    for number, line in jsonl.numbered_lines(path, fault):
        try:
            yield number, line.decode()
        except UnicodeDecodeError as error:
            fault(CorpusError(f"{path}:{number}: not UTF-8: {error}"))


def _fields(read: list[str], texts: Iterator[tuple[int, str]]) -> list[str] | None:
    """Return the fields of the row that begins with a line, or None if a quote stays open. The lines in which quoted
    fields go on are moved from `texts` to `read`."""

    def lines() -> Iterator[str]:
        yield read[0]
        left = jsonl.LINE_BYTES
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
