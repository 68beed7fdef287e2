"""The documents of a corpus, and how long ones are cut into chunks at sentence borders."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain

from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.words import AUTO, STOP_WORDS, Remembered, pieces, stemmer, words, words_of

CHARACTERS_PER_TOKEN = 4
_NO_SPACE = re.compile(r"\S")
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


def join_text(chunk: Chunk) -> str:
    """Return what a search by terms reads of a chunk."""
    return f"{chunk.title} {chunk.text}"


def approximate_tokens(text: str) -> int:
    """Return the size of a text in tokens, without a tokenizer: characters / 4, rounded up, equal on every machine."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def chunk(document: Document, max_tokens: int) -> list[Chunk]:
    """Cut a document into chunks of at most `max_tokens` approximate tokens: at the last sentence border that fits,
    else at white space, else anywhere; only white space is dropped. One that fits stays whole, under its own id; others
    have `doc_id#index`. A document that comes with chunks keeps them."""
    texts, ids = [document.text], [ChunkId(document.doc_id)]
    if document.chunks:
        texts = [document.text[given.start : given.end] for given in document.chunks]
        ids = [given.chunk_id for given in document.chunks]
    elif approximate_tokens(document.text) > max_tokens:
        places = cut(document.text, max_tokens * CHARACTERS_PER_TOKEN)
        texts = [document.text[start:end] for start, end in places] or [""]
        if len(texts) > 1:
            ids = [ChunkId(f"{document.doc_id}#{index}") for index in range(len(texts))]
    pairs = enumerate(zip(ids, texts, strict=True))
    return [Chunk(chunk_id, document.doc_id, index, document.title, text) for index, (chunk_id, text) in pairs]


def cut(text: str, limit: int) -> Iterator[tuple[int, int]]:
    """Yield where stretches of 1 to `limit` characters begin and end, without white space at their ends."""
    found = _BORDER.finditer(text)
    ends = [border.start() for border in found if border[1] is None or border[1].isupper() or border[1].isdigit()]
    stop, first = len(text.rstrip()), _NO_SPACE.search(text)
    while first:
        start = first.start()
        end = min(start + limit, stop)
        if end < stop:
            last = bisect_right(ends, end) - 1
            if last >= 0 and ends[last] > start:
                end = ends[last]
            else:
                end = next((at for at in range(end, start, -1) if text[at].isspace()), end)
        yield start, start + len(text[start:end].rstrip())
        first = _NO_SPACE.search(text, end)


ANALYSER = "words of all scripts, as written and in parts, NFKC, stop words of Lucene, stemmers of Snowball"
"""Names what `Analyser` does, in indexes and their hashes: change both together, and earlier indexes are refused."""


class Analyser:
    """Turns a text into terms: the words of all scripts (`harness1.words`). `language`: one of Snowball's, `none`, or
    `auto`, by the script of each word, decides their stems. Only `auto` and `english` drop stop words."""

    def __init__(self, language: str = AUTO) -> None:
        self._stem = stemmer(language)
        self._dropped = STOP_WORDS if language in ("english", AUTO) else frozenset[str]()
        self._remembered = Remembered(self.terms_of)
        self.language = language

    def terms_of(self, piece: str) -> tuple[str, ...]:
        """Return the terms of one of the `pieces` of a text."""
        return tuple(self._terms(words_of(piece, inner=True)))

    def terms(self, text: str) -> list[str]:
        """Return the terms that a text is found by."""
        return [*chain.from_iterable(map(self._remembered.__getitem__, pieces(text)))]

    def query_terms(self, query: str) -> list[str]:
        """Return the terms that a query asks for."""
        return self._terms(words(query))

    def _terms(self, words: list[str]) -> list[str]:
        return [self._stem(word) for word in words if word not in self._dropped]
