"""The documents of a corpus, before they are cut and indexed."""

from __future__ import annotations

from harness1.records import ChunkId, DocId, Record

CHARACTERS_PER_TOKEN = 4


class GivenChunk(Record):
    """A chunk that a document came with: its own id, and the characters from `start` to before `end`."""

    chunk_id: ChunkId
    start: int
    end: int


class Document(Record):
    """One text of a corpus, whole, under its own id."""

    doc_id: DocId
    title: str
    text: str
    chunks: tuple[GivenChunk, ...] = ()
    """The chunks of a benchmark whose gold names them; if empty, indexing cuts the document."""


def approximate_tokens(text: str) -> int:
    """Return the size of a text in tokens, without a tokenizer: characters / 4, rounded up, equal on every machine."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)
