"""Corpora of benchmarks: files whose rows are documents, or chunks whose ids name their document.

A row with a `chunk_id` is a chunk, its text under `document_text` or `text`; the document's id is the chunk's without
the number after its last underscore (`0000320193-24-000081_17`). Other rows are documents: an id (`docid`, `_id`,
`id`, `doc_id` or `url`), a text (`text`, `contents`, `content`) and perhaps a `title`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import EmptyText, Fault, distinct, made
from harness1.data.formats.jsonl import TEXT_KEYS, distinct_documents, identifier
from harness1.errors import CorpusError
from harness1.hashing import text_digest
from harness1.records import ChunkId, DocId
from harness1.retrieval.corpus import Document, GivenChunk

DOCUMENT_KEYS = ("docid", "_id", "id", "doc_id", "url")
CHUNK_KEYS = ("chunk_id",)
CHUNK_TEXT_KEYS = ("document_text", "text")
BETWEEN = "\n"
"""Joins the chunks of a document."""
Placed = tuple[Document, str, str]
"""A document at one place, the content that all its places must share, and the problem to note if this one differs."""
_NUMBER = re.compile(r"_(\d+)$", re.ASCII)


@dataclass(frozen=True)
class Corpus:
    """Documents, and the ids of documents and chunks that gold may name."""

    documents: Callable[[], Iterator[Document]]
    """Starts a new, lazy pass over all documents."""
    ids: Callable[[], Iterable[str]]
    """Starts a new pass over all ids, some of which may repeat."""


def corpus_of(files: Sequence[Path], fault: Fault, spelling: Callable[[str], DocId] = DocId) -> Corpus:
    """Open the corpus in some files.

    Args:
        fault: handles a row that is neither a document nor a chunk, or repeats an id.
        spelling: normalises the ids of whole documents, if the files may write one id in several ways.
    """
    return Corpus(lambda: _read(files, fault, spelling), lambda: _ids(files, spelling))


def pooled(read: Callable[[], Iterator[Placed]], problems: list[str]) -> Corpus:
    """Open documents that may each occur at several places. The first counts; others with different content are noted
    in `problems`.

    Args:
        read: starts a pass over all places.
    """

    def documents() -> Iterator[Document]:
        problems.clear()
        contents: dict[DocId, str] = {}
        for document, content, problem in read():
            digest = text_digest(content)
            if document.doc_id not in contents:
                contents[document.doc_id] = digest
                yield document
            elif contents[document.doc_id] != digest:
                problems.append(problem)

    return Corpus(documents, lambda: (document.doc_id for document in documents()))


def document_of(chunk_id: str) -> DocId:
    """Return the document of a chunk."""
    return DocId(_NUMBER.sub("", chunk_id))


def _read(files: Sequence[Path], fault: Fault, spelling: Callable[[str], DocId]) -> Iterator[Document]:
    """Yield the documents of some files. Chunks may come in any order: a document is complete after its last chunk, so
    that memory holds only incomplete ones."""
    first = next(tables.rows(files, fault), None)
    if first is None:
        return iter(())
    return _assembled(files, fault) if "chunk_id" in first[1] else _whole(files, fault, spelling)


def _whole(files: Sequence[Path], fault: Fault, spelling: Callable[[str], DocId]) -> Iterator[Document]:
    rows = tables.rows(files, fault, (*DOCUMENT_KEYS, *TEXT_KEYS, "title"))
    return distinct_documents(rows, lambda where, row: _document(where, row, spelling), fault)


def _document(where: str, row: Row, spelling: Callable[[str], DocId]) -> Document:
    doc_id = spelling(identifier(where, row, DOCUMENT_KEYS))
    title, text = row.get("title") or "", next((row[key] for key in TEXT_KEYS if row.get(key) is not None), "")
    if not isinstance(title, str) or not isinstance(text, str):
        raise CorpusError(f"{where}: title and text of document {doc_id!r} must be texts")
    if not title.strip() and not text.strip():
        raise EmptyText(f"{where}: document {doc_id!r} has neither title nor text")
    return Document(doc_id=doc_id, title=title, text=text)


class _Piece(NamedTuple):
    """A chunk; pieces sort by their numbers."""

    number: int
    chunk_id: ChunkId
    text: str


def _assembled(files: Sequence[Path], fault: Fault) -> Iterator[Document]:
    left = Counter(document_of(chunk_id) for chunk_id in _chunk_ids(files))
    incomplete: dict[DocId, list[tuple[str, _Piece]]] = {}
    rows = tables.rows(files, fault, (*CHUNK_KEYS, *CHUNK_TEXT_KEYS))
    for where, (chunk_id, row) in made(rows, lambda where, row: (_chunk_id(where, row), row), fault):
        doc_id = document_of(chunk_id)
        pieces = incomplete.setdefault(doc_id, [])
        left[doc_id] -= 1
        try:
            pieces.append((where, _piece(where, row, chunk_id)))
        except CorpusError as error:
            fault(error)
        if not left[doc_id]:
            yield from _put_together(doc_id, incomplete.pop(doc_id), fault)


def _piece(where: str, row: Row, chunk_id: ChunkId) -> _Piece:
    text = next((row[key] for key in CHUNK_TEXT_KEYS if row.get(key) is not None), None)
    if not isinstance(text, str):
        raise CorpusError(f"{where}: chunk {chunk_id!r} needs a text ({', '.join(CHUNK_TEXT_KEYS)})")
    if not text.strip():
        raise EmptyText(f"{where}: chunk {chunk_id!r} has no text")
    number = _NUMBER.search(chunk_id)
    return _Piece(int(number[1]) if number else 0, chunk_id, text)


def _put_together(doc_id: DocId, pieces: list[tuple[str, _Piece]], fault: Fault) -> Iterator[Document]:
    """Yield the document made of some chunks, in the order of their numbers, or nothing if no chunk is left."""
    ordered = sorted(piece for _, piece in distinct(pieces, lambda piece: piece.chunk_id, fault))
    chunks, start = [], 0
    for piece in ordered:
        chunks.append(GivenChunk(piece.chunk_id, start, start + len(piece.text)))
        start += len(piece.text) + len(BETWEEN)
    if chunks:
        text = BETWEEN.join(piece.text for piece in ordered)
        yield Document(doc_id=doc_id, title="", text=text, chunks=tuple(chunks))


def _ids(files: Sequence[Path], spelling: Callable[[str], DocId]) -> Iterator[str]:
    """Yield the ids in some files. Rows without one are skipped, because reading the documents reports them."""
    for _, row in tables.rows(files, _pass_over, (*CHUNK_KEYS, *DOCUMENT_KEYS)):
        if "chunk_id" in row:
            yield (chunk_id := str(row["chunk_id"]))
            yield document_of(chunk_id)
        else:
            yield from (spelling(str(row[key])) for key in DOCUMENT_KEYS if row.get(key) is not None)


def _chunk_ids(files: Sequence[Path]) -> Iterator[ChunkId]:
    return (chunk_id for _, chunk_id in made(tables.rows(files, _pass_over, CHUNK_KEYS), _chunk_id, _pass_over))


def _chunk_id(where: str, row: Row) -> ChunkId:
    return ChunkId(identifier(where, row, CHUNK_KEYS))


def _pass_over(error: CorpusError) -> None:
    """Ignore what reading the documents already reports."""
