"""The workload of `env_turn.py` on real passages: those of a corpus, in its order, in place of made-up text.

Corpora of multi-hop questions list the passages of one question together, so the passages of an episode name each
other as those of a real search do. Its query is a question about some of them. One hit in ten is a copy of an earlier
one with other words at its end, which the guard against near duplicates recognises.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from string import ascii_lowercase

import msgspec

from benchmarks.workload import CHANGED_WORDS, CHUNKS, NEAR_DUPLICATES, Mode, Workload, moves_of
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.memory.dedup import guard
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.corpus import Document

COPIED_WORDS = 60
"""Words from which a passage is copied: with fewer, a copy is less similar than the threshold asks."""


def passages(source: Source, turns: int, mode: Mode, episodes: int) -> list[Workload]:
    """Return episodes over a corpus; no two share a passage.

    Raises:
        UsageError: the corpus has too few documents.
    """
    size = turns * CHUNKS
    documents = list(islice((each for each in source.documents() if len(each.text.split()) >= 3), episodes * size))
    if len(documents) < episodes * size:
        raise UsageError(f"{source.name} has {len(documents)} passages, and the episodes need {episodes * size}")
    parts = [documents[start : start + size] for start in range(0, len(documents), size)]
    questions = _questions(source, parts)
    return [_episode(part, turns, mode, number, questions[number]) for number, part in enumerate(parts)]


def _questions(source: Source, parts: Sequence[Sequence[Document]]) -> list[str]:
    """Return for each episode the first question whose gold is among its passages, or else its first title."""
    episode = {document.doc_id: number for number, part in enumerate(parts) for document in part}
    found: dict[int, str] = {}
    for task in (task for split in source.splits for task in source.tasks(split)):
        for doc_id in task.gold.relevant if task.gold else ():
            if doc_id in episode:
                found.setdefault(episode[DocId(doc_id)], task.query)
    return [found.get(number, part[0].title) for number, part in enumerate(parts)]


def _episode(documents: Sequence[Document], turns: int, mode: Mode, number: int, question: str) -> Workload:
    rng = random.Random(f"passages/{mode}/{number}")
    return Workload(question, moves_of(rng, _with_copies(rng, documents), turns, mode))


def _with_copies(rng: random.Random, documents: Sequence[Document]) -> Iterator[Chunk]:
    """Yield the passages as chunks; some make way for a copy of an earlier one."""
    sources: list[Chunk] = []
    for document in documents:
        chunk = Chunk(ChunkId(document.doc_id), document.doc_id, 0, document.title, document.text)
        if sources and rng.random() < NEAR_DUPLICATES:
            chunk = _copy(rng, rng.choice(sources), len(sources))
        elif len(document.text.split()) >= COPIED_WORDS:
            sources.append(chunk)
        yield chunk


def _copy(rng: random.Random, chunk: Chunk, number: int) -> Chunk:
    """Return a near duplicate: the last words are others, unless one of them is a number, a date or a negation."""
    changed = ["x" + "".join(rng.choices(ascii_lowercase, k=3)) for _ in range(CHANGED_WORDS)]
    text = " ".join([*chunk.text.split()[:-CHANGED_WORDS], *changed])
    if guard(chunk.title, text) != guard(chunk.title, chunk.text):
        text = f"{chunk.text} {changed[0]}"
    doc_id = DocId(f"{chunk.doc_id}-copy{number}-{changed[0]}")
    return msgspec.structs.replace(chunk, chunk_id=ChunkId(doc_id), doc_id=doc_id, text=text)
