"""The seeded workload of the benchmarks, and the stub that serves it in place of a search engine.

Each search finds `CHUNKS` new chunks of about `WORDS` words; one in ten repeats an earlier chunk with three words
changed. Mode `search` searches at every turn, mode `mix` searches and curates in turn. The text is made of sentences
of a synthetic world: prose with names, dates and numbers that is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from harness1.data.world import build_world
from harness1.env.sentences import split
from harness1.records import TAGS, Chunk, ChunkId, DocId, ToolCall
from harness1.retrieval.retriever import (
    BadPattern,
    IndexInfo,
    RetrievalFault,
    Scored,
    SearchRequest,
    SearchResult,
)

Mode = Literal["search", "mix"]
MODES: tuple[Mode, ...] = get_args(Mode)
CHUNKS = 10
WORDS = 165
NEAR_DUPLICATES = 0.1
CHANGED_WORDS = 3
WORLD_SIZE = 2000


@dataclass(frozen=True)
class Move:
    """One turn: what the policy thinks and does, and what a search then finds."""

    reasoning: str
    action: ToolCall
    found: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class Workload:
    query: str
    moves: tuple[Move, ...]


class Served:
    """A `Retriever` that returns what it was last told to return, best first."""

    def __init__(self) -> None:
        self.info = IndexInfo("workload", "document", 0, 0)
        self.found: tuple[Chunk, ...] = ()

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        hits = tuple(Scored(chunk, float(len(self.found) - rank)) for rank, chunk in enumerate(self.found))
        return [SearchResult(hits) for _ in requests]

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        return self.found[:limit]

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        return tuple(chunk for chunk in self.found if chunk.doc_id == doc_id)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        return tuple(chunk for chunk in self.found if chunk.chunk_id in chunk_ids)


def workload(turns: int, mode: Mode, seed: int) -> Workload:
    """An episode of the workload; no two seeds share a chunk."""
    rng = random.Random(f"{mode}/{seed}")
    seen: list[str] = []
    moves: list[Move] = []
    for turn in range(turns):
        if mode == "search" or turn % 2 == 0:
            found = tuple(_chunk(seed, len(seen), _new_text(rng, seen)) for _ in range(CHUNKS))
            words = found[0].text.split()
            query = " ".join(rng.sample(words, 8))
            thought = " ".join(rng.choices(found[1].text.split(), k=90))
            moves.append(Move(thought, ToolCall("search_corpus", {"query": query}), found))
        else:
            chosen: list[str] = [chunk.doc_id for chunk in rng.sample(moves[-1].found, 3)]
            tags = {doc_id: rng.choice(TAGS) for doc_id in chosen}
            thought = " ".join(rng.choices(moves[-1].found[0].text.split(), k=60))
            moves.append(Move(thought, ToolCall("curate", {"add_ids": chosen, "importance": tags})))
    return Workload(" ".join(rng.sample(_text(rng).split(), 20)), tuple(moves))


def _chunk(seed: int, number: int, text: str) -> Chunk:
    doc_id = DocId(f"d{seed:02d}{number:05d}")
    return Chunk(ChunkId(f"{doc_id}_0"), doc_id, 0, "", text)


def _new_text(rng: random.Random, seen: list[str]) -> str:
    """The text of the next chunk, noted in `seen`."""
    if seen and rng.random() < NEAR_DUPLICATES:
        words = rng.choice(seen).split()
        for _ in range(CHANGED_WORDS):
            words[rng.randrange(len(words))] = f"x{rng.randrange(999)}"
        seen.append(" ".join(words))
    else:
        seen.append(_text(rng))
    return seen[-1]


def _text(rng: random.Random) -> str:
    """Sentences until there are about `WORDS` words."""
    sentences: list[str] = []
    size = 0
    while size < WORDS:
        sentences.append(rng.choice(_sentences()))
        size += len(sentences[-1].split())
    return " ".join(sentences)


@lru_cache(maxsize=1)
def _sentences() -> tuple[str, ...]:
    documents = build_world(WORLD_SIZE).documents()
    return tuple(dict.fromkeys(sentence for document in documents for sentence in split(document.text)))
