"""The documents of a corpus, and how long ones are cut into chunks at sentence borders."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from harness1.records import Chunk, ChunkId, DocId, Record

CHARACTERS_PER_TOKEN = 4
_BORDER = re.compile(r"(?<=[.!?])\s+(?=(\w))|\n")
"""Possible ends of sentences; the captured first letter of the next sentence, if any, decides."""


class GivenChunk(Record):
    """A chunk that a document came with: its own id, and the characters from `start` up to, not including, `end`."""

    chunk_id: ChunkId
    start: int
    end: int


class Document(Record):
    """One text of a corpus, whole, under its own id."""

    doc_id: DocId
    title: str
    text: str
    chunks: tuple[GivenChunk, ...] = ()
    """The document's chunks, if the gold of its benchmark names chunks; if empty, indexing cuts the document."""


def searched_text(chunk: Chunk) -> str:
    """Return what a search by terms reads of a chunk."""
    return f"{chunk.title} {chunk.text}"


def approximate_tokens(text: str) -> int:
    """Return the size of a text in tokens, without a tokenizer: characters / 4, rounded up, equal on every machine."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def chunk(document: Document, max_tokens: int) -> list[Chunk]:
    """Cut a document into chunks of at most `max_tokens` approximate tokens; a document that fits stays whole.

    A cut is made at the last sentence border that fits (white space between `.`, `!` or `?` and an upper-case letter or
    a digit, or a line break), else at the last white space, else where the limit is reached. Only white space at the
    cuts is dropped. A document's only chunk has the document's id; others have `doc_id#index`. A document that comes
    with chunks keeps them and their ids, whatever their size.
    """
    return [
        Chunk(chunk_id=chunk_id, doc_id=document.doc_id, index=index, title=document.title, text=text)
        for index, (chunk_id, text) in enumerate(_pieces(document, max_tokens))
    ]


def _pieces(document: Document, max_tokens: int) -> list[tuple[ChunkId, str]]:
    if document.chunks:
        return [(given.chunk_id, document.text[given.start : given.end]) for given in document.chunks]
    if approximate_tokens(document.text) <= max_tokens:
        return [(ChunkId(document.doc_id), document.text)]
    texts = list(_cut(document.text, max_tokens * CHARACTERS_PER_TOKEN)) or [""]
    if len(texts) == 1:
        return [(ChunkId(document.doc_id), texts[0])]
    return [(ChunkId(f"{document.doc_id}#{index}"), text) for index, text in enumerate(texts)]


def _cut(text: str, limit: int) -> Iterator[str]:
    """Yield stretches of 1 to `limit` characters, without white space at their ends."""
    ends = [border.start() for border in _BORDER.finditer(text) if _starts_sentence(border.group(1))]
    start, stop = _skip_space(text, 0), len(text.rstrip())
    while start < stop:
        end = _next_cut(text, start, stop, limit, ends)
        yield text[start:end].rstrip()
        start = _skip_space(text, end)


def _next_cut(text: str, start: int, stop: int, limit: int, ends: list[int]) -> int:
    """Return the end of the chunk that begins at `start`: after it, by at most `limit` characters."""
    furthest = start + limit
    if stop <= furthest:
        return stop
    last = bisect_right(ends, furthest) - 1
    if last >= 0 and ends[last] > start:
        return ends[last]
    return next((at for at in range(furthest, start, -1) if text[at].isspace()), furthest)


def _starts_sentence(first: str | None) -> bool:
    return first is None or first.isupper() or first.isdigit()


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
