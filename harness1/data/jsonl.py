"""Documents as JSON Lines, plain or gzipped: BEIR's corpus file, Pyserini's collections, and what resembles them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import CorpusError
from harness1.records import DocId
from harness1.retrieval.corpus import Document

ID_KEYS = ("_id", "id", "doc_id")
TEXT_KEYS = ("text", "contents", "content")


def read(path: Path) -> Iterator[Document]:
    """The documents of a file, lazily, in its order.

    Each line is an object with an id (`_id`, `id` or `doc_id`), a text (`text`, `contents` or `content`) and perhaps a
    `title`; the text may be empty where there is a title. Other keys are ignored.

    Raises:
        CorpusError: a line is no such object or repeats an id (`file:line` is named), or the file cannot be read.
    """
    seen: set[str] = set()
    for where, row in rows(path):
        document = _document(where, row)
        if document.doc_id in seen:
            raise CorpusError(f"{where}: the id {document.doc_id!r} occurs a second time")
        seen.add(document.doc_id)
        yield document


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, each with its place as `file:line`; blank lines are passed over.

    Raises:
        CorpusError: a line is no JSON object, or the file cannot be read.
    """
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield where, decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorpusError(f"{where}: not a JSON object: {error}") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a plain or gzipped file, numbered from 1.

    Raises:
        CorpusError: the file cannot be opened or unpacked.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            yield from enumerate(lines, start=1)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"cannot read {path}: {error}") from error


def find_file(folder: Path, name: str) -> Path | None:
    """`folder/name`, or the same with `.gz`, whichever exists; the plain file comes first."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def identifier(where: str, row: dict[str, Any]) -> str:
    """The id of a row: text, or a whole number.

    Raises:
        CorpusError: it has none.
    """
    value = next((row[key] for key in ID_KEYS if key in row), None)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise CorpusError(f"{where}: needs an id ({', '.join(ID_KEYS)}) that is text or a whole number")
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
        raise CorpusError(f"{where}: document {doc_id!r} has neither title nor text")
    return Document(doc_id=DocId(doc_id), title=title, text=text)
