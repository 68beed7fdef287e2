"""A corpus of any size that looks like Wikipedia: real passages, padded, then varied word by word.

The first chunks are the passages of a real corpus, padded with sentences of others to about 165 words. Later ones are
copies with one word in twelve replaced: by another word of the corpus (80 %), a made-up name (13 %) or a number
(7 %). Near copies are more common than in real text, so ratios are meaningful, and absolute times are not.
"""

from __future__ import annotations

import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness1.config import Index
from harness1.data.open import open_source
from harness1.records import ChunkId, DocId
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Analyser, Document
from harness1.retrieval.index import EmbeddedIndex, open_index

WORDS = 145
"""Minimum number of words of a chunk; the average is about 165."""
REPLACED = 12
"""One word in this many is replaced."""
WINDOW = 14
QUERY_WORDS = 10
SYLLABLES = ("ka", "lo", "mi", "ra", "ten", "vor", "shi", "bel", "qua", "dun", "ef", "os", "yr", "zan", "gu", "pri")


def corpus(seed: str, chunks: int) -> Iterator[Document]:
    """Yield documents of one chunk each, named by their number; the same for equal arguments."""
    rng = random.Random(chunks)
    base = _padded(seed, rng)
    words = [word for text in base for word in text.split()]
    for number in range(chunks):
        text = base[number % len(base)]
        if number >= len(base):
            text = _varied(text, words, rng)
        title, _, rest = text.partition(" ")
        yield Document(doc_id=chunk_name(number), title=title, text=rest)


def chunk_name(number: int) -> DocId:
    """Return the id of a document, and of its one chunk."""
    return DocId(f"c{number:07d}")


def chunk_number(name: str | int) -> int:
    """Return the number of a chunk, given its id or its number."""
    return name if isinstance(name, int) else int(name[1:])


def queries(seed: str, chunks: int, count: int) -> list[list[str]]:
    """Return analysed queries: up to ten words from a window of a chunk, without stop words."""
    rng, analyser = random.Random(count), Analyser()
    wanted = sorted(rng.sample(range(chunks), count))
    found, texts = [], enumerate(document.text for document in corpus(seed, chunks))
    for place in wanted:
        words = next(text for number, text in texts if number == place).split()
        start = rng.randrange(max(1, len(words) - WINDOW))
        window = words[start : start + WINDOW]
        terms = analyser.terms(" ".join(rng.sample(window, min(QUERY_WORDS, len(window)))))
        found.append(terms or ["film"])
    return found


def _padded(seed: str, rng: random.Random) -> list[str]:
    passages = [f"{document.title} {document.text}" for document in open_source(seed).documents()]
    sentences = [sentence for text in passages for sentence in re.split(r"(?<=[.!?])\s+", text)]
    padded = []
    for text in passages:
        while len(text.split()) < WORDS:
            text = f"{text} {rng.choice(sentences)}"
        padded.append(text)
    return padded


def _varied(text: str, words: list[str], rng: random.Random) -> str:
    varied = text.split()
    for at in rng.sample(range(len(varied)), len(varied) // REPLACED):
        draw = rng.random()
        if draw < 0.80:
            varied[at] = rng.choice(words)
        elif draw < 0.93:
            varied[at] = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 5))).capitalize()
        else:
            varied[at] = str(rng.randrange(10**6))
    return " ".join(varied)


K1, B = 1.2, 0.75


class Engine(Protocol):
    """An engine to measure."""

    def build(self, seed: str, chunks: int) -> None:
        """Index the synthetic corpus on disk, starting from its texts."""
        ...

    def open(self) -> None: ...

    def named(self, numbers: Sequence[int]) -> list[Any]:
        """Return the names of chunks that the engine's users know: ids, or places in the corpus."""
        ...

    def search(self, terms: list[str], k: int, exclude: Sequence[Any]) -> list[Any]:
        """Return the names of the best chunks."""
        ...


class Ours:
    """The embedded index with everything that a user's index holds, including texts and the index for grep."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "ours"
        self._index: EmbeddedIndex

    def build(self, seed: str, chunks: int) -> None:
        build_index(corpus(seed, chunks), self._folder, Index(chunk_tokens=100_000))

    def open(self) -> None:
        self._index = open_index(self._folder)

    def named(self, numbers: Sequence[int]) -> list[Any]:
        return [chunk_name(number) for number in numbers]

    def search(self, terms: list[str], k: int, exclude: Sequence[Any]) -> list[ChunkId]:
        found = self._index.bm25.search(terms, k, np.array(self._index.positions(exclude), np.int64))
        return [self._index.chunk(position).chunk_id for position, _ in found]


class BM25S:
    """bm25s with its numba backend."""

    backend, mmap = "numba", False

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "bm25s"
        self._model: Any = None
        self._size = 0

    def build(self, seed: str, chunks: int) -> None:
        import bm25s
        import Stemmer

        texts = [f"{document.title} {document.text}" for document in corpus(seed, chunks)]
        tokens = bm25s.tokenize(texts, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False)
        del texts
        model = bm25s.BM25(method="lucene", k1=K1, b=B, backend=self.backend)
        model.index(tokens, show_progress=False)
        model.save(self._folder)

    def open(self) -> None:
        import bm25s

        self._model = bm25s.BM25.load(self._folder, mmap=self.mmap)
        self._model.backend = self.backend
        if self.backend == "numba":
            self._model.activate_numba_scorer()
        self._size = self._model.scores["num_docs"]

    def named(self, numbers: Sequence[int]) -> list[Any]:
        return list(numbers)

    def search(self, terms: list[str], k: int, exclude: Sequence[Any]) -> list[int]:
        mask = None
        if exclude:
            mask = np.ones(self._size, np.float32)
            mask[list(exclude)] = 0.0
        found, _ = self._model.retrieve([terms], k=k, show_progress=False, n_threads=0, weight_mask=mask)
        return found[0].tolist()  # type: ignore[no-any-return]


class BM25SMapped(BM25S):
    """bm25s with memory-mapped arrays."""

    mmap = True


class BM25SNumpy(BM25S):
    """bm25s without numba."""

    backend = "numpy"


class Tantivy:
    """tantivy-py with its English stemmer; chunks are excluded by a term-set query that must not match."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tantivy"
        self._index: Any = None

    def build(self, seed: str, chunks: int) -> None:
        import tantivy

        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("id", stored=True, tokenizer_name="raw", fast=True)
        builder.add_text_field("text", stored=False, tokenizer_name="en_stem", index_option="freq")
        index = tantivy.Index(builder.build(), path=str(self._folder))
        writer = index.writer(256 << 20, num_threads=1)
        for document in corpus(seed, chunks):
            writer.add_document(tantivy.Document(id=document.doc_id, text=f"{document.title} {document.text}"))
        writer.commit()
        writer.wait_merging_threads()

    def open(self) -> None:
        import tantivy

        self._index = tantivy.Index.open(str(self._folder))
        self._searcher = self._index.searcher()

    def named(self, numbers: Sequence[int]) -> list[Any]:
        return [chunk_name(number) for number in numbers]

    def search(self, terms: list[str], k: int, exclude: Sequence[Any]) -> list[str]:
        import tantivy

        schema = self._index.schema
        parts = [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "text", term, "freq")) for term in terms]
        if exclude:
            parts.append((tantivy.Occur.MustNot, tantivy.Query.term_set_query(schema, "id", list(exclude))))
        hits = self._searcher.search(tantivy.Query.boolean_query(parts), limit=k, count=False).hits
        return [self._searcher.doc(address)["id"][0] for _, address in hits]


class RankBM25:
    """rank_bm25: scores every chunk in plain numpy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "rank_bm25"
        self._model: Any = None

    def build(self, seed: str, chunks: int) -> None:
        import pickle

        from rank_bm25 import BM25Okapi

        analyser = Analyser()
        model = BM25Okapi([analyser.terms(f"{each.title} {each.text}") for each in corpus(seed, chunks)], k1=K1, b=B)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "model.pickle").write_bytes(pickle.dumps(model))

    def open(self) -> None:
        import pickle

        self._model = pickle.loads((self._folder / "model.pickle").read_bytes())

    def named(self, numbers: Sequence[int]) -> list[Any]:
        return list(numbers)

    def search(self, terms: list[str], k: int, exclude: Sequence[Any]) -> list[int]:
        scores = self._model.get_scores(terms)
        scores[list(exclude)] = 0.0
        best = np.argpartition(-scores, k)[:k]
        return best[np.argsort(-scores[best])].tolist()  # type: ignore[no-any-return]


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "ours": Ours,
    "bm25s numba": BM25S,
    "bm25s numba mmap": BM25SMapped,
    "bm25s numpy": BM25SNumpy,
    "tantivy": Tantivy,
    "rank_bm25": RankBM25,
}
BUILT_BY = {"bm25s numba mmap": "bm25s numba", "bm25s numpy": "bm25s numba"}
"""Engines that open what another one built."""


def resident_mb() -> float:
    """Return the present resident memory of this process, as the system reports it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmRSS in /proc/self/status")


def peak_mb() -> float:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def disk_mb(folder: Path) -> float:
    """Return the size of all files below a folder in megabytes, counting each file once."""
    files = {path.stat().st_ino: path.stat().st_size for path in _files(folder)}
    return sum(files.values()) / 1e6


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
