"""BM25 over the segments of an index. The score of a chunk is the sum over the terms of the query, as often as each
occurs there, of

    ln(1 + (N - n + 0.5) / (n + 0.5)) * f / (f + k1 * (1 - b + b * length / mean length))

with N chunks in all, n of them with the term, and f occurrences in this one: Lucene's variant, exact lengths
(Kamphuis et al., "Which BM25 do you mean?", ECIR 2020). N, n and the mean length count all segments together without
deleted chunks, so scores are the same, bit for bit, however the corpus is divided into segments.

The postings of a segment are written in sorted runs of bounded memory that are merged at the end (Heinz and Zobel,
"Efficient single-pass index construction for text databases", JASIST 2003), then memory-mapped:

    terms.*                 the terms (`harness1.retrieval.files.Keys`)
    postings.starts.npy     [terms + 1] where the postings of each term begin
    postings.chunks.npy     the chunks of each term, ascending
    postings.codes.npy      for each posting its pair (occurrences, length of the chunk): a row of postings.pairs.npy
    postings.lengths.npy    [chunks] length of each chunk in terms
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness1.retrieval.corpus import Analyser
from harness1.retrieval.files import DamagedFile, Files, Keys, write_keys
from harness1.retrieval.protocol import STEP, best_first
from harness1.words import Remembered, pieces

RUN_WORDS = 1 << 23
"""Terms inverted at a time, in memory."""
NONE = np.empty(0, np.uint32)
K1, B = 1.2, 0.75
"""Saturation, how much a term's further occurrences still add, and the share of normalisation by length (Robertson)."""


class PostingsWriter:
    """Takes the texts of all chunks in order, then writes their postings."""

    def __init__(self, folder: Path, analyser: Analyser) -> None:
        terms: dict[str, int] = {}

        def numbers(piece: str) -> tuple[int, ...]:
            return tuple([terms.setdefault(term, len(terms)) for term in analyser.terms_of(piece)])

        self._folder, self._terms, self._numbers_of = folder, terms, Remembered(numbers)
        self._numbers, self._sizes = array("i"), array("i")
        self._lengths = array("i")
        self._pairs: dict[int, int] = {}
        """The code of each pair, which is occurrences << 32 | length."""
        self._runs: list[Path] = []

    def add(self, text: str) -> None:
        """Add the text of the next chunk."""
        before = len(self._numbers)
        self._numbers.extend(chain.from_iterable(map(self._numbers_of.__getitem__, pieces(text))))
        self._sizes.append(len(self._numbers) - before)
        if len(self._numbers) >= RUN_WORDS:
            self._write_run()

    def _write_run(self) -> None:
        from harness1.retrieval.kernels import count_terms, invert

        vocabulary = len(self._terms)
        last, slots = np.full(vocabulary, -1, np.int32), np.empty(vocabulary, np.int32)
        numbers, sizes = np.array(self._numbers, np.int32), np.array(self._sizes, np.int32)
        terms, counts, distinct = count_terms(numbers, sizes, last, slots)
        pairs = counts.astype(np.int64) << 32 | np.repeat(sizes, distinct)
        kinds = np.unique(pairs)
        known = np.array([self._pairs.setdefault(pair, len(self._pairs)) for pair in kinds.tolist()], np.uint32)
        codes = known[np.searchsorted(kinds, pairs)]
        run = self._folder / f"run-{len(self._runs)}"
        run.mkdir()
        made = invert(terms, codes, distinct, len(self._lengths), vocabulary)
        for name, values in zip(("starts", "chunks", "codes"), map(np.asarray, made), strict=True):
            np.save(run / f"{name}.npy", values)
        self._runs.append(run)
        self._lengths.extend(self._sizes)
        self._numbers, self._sizes = array("i"), array("i")

    def finish(self) -> int:
        """Write all files, and return the total length of all chunks, in terms."""
        from harness1.retrieval.kernels import append_run

        self._write_run()
        pairs = np.array(list(self._pairs), np.int64)
        folder = self._folder
        np.save(folder / "postings.lengths.npy", np.array(self._lengths, np.int32))
        np.save(folder / "postings.pairs.npy", np.stack((pairs >> 32, pairs & 0xFFFFFFFF), 1).astype(np.int32))
        write_keys(folder, "terms", self._terms)
        runs = [np.load(run / "starts.npy") for run in self._runs]
        starts = np.zeros(len(self._terms) + 1, np.int64)
        for run_starts in runs:
            starts[1 : len(run_starts)] += np.diff(run_starts)
        starts = np.cumsum(starts)
        np.save(folder / "postings.starts.npy", starts)
        kinds: dict[str, Any] = {"chunks": np.uint32, "codes": np.uint16 if len(pairs) <= 1 << 16 else np.uint32}
        for name, kind in kinds.items():
            ends, path, out = starts[:-1].copy(), folder / f"postings.{name}.npy", np.empty(0, kind)
            if starts[-1]:
                out = np.lib.format.open_memmap(path, "w+", dtype=kind, shape=(int(starts[-1]),))
                with path.open("r+b") as file:  # if the space were not reserved, a full disk would end the process
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            else:  # an empty file cannot be mapped
                np.save(path, out)
            for run, run_starts in zip(self._runs, runs, strict=True):
                append_run(ends, out, run_starts, np.load(run / f"{name}.npy"))
                (run / f"{name}.npy").unlink()  # or the disk would hold all of them twice
        for run in self._runs:
            shutil.rmtree(run)
        return sum(self._lengths)


class Postings:
    """The mapped postings of a segment; its deleted chunks, sorted; and in how many of these each term occurs."""

    def __init__(self, files: Files, dead: NDArray[np.uint32], dead_counts: NDArray[np.int32] | None) -> None:
        self._terms = Keys(files, "terms")
        self._starts = files.file("postings.starts.npy")
        self._chunks, self._codes = files.file("postings.chunks.npy"), files.file("postings.codes.npy")
        self.lengths: NDArray[np.int32] = files.load("postings.lengths.npy")
        self.pairs: NDArray[np.int32] = files.load("postings.pairs.npy")
        self.dead, self._dead_counts = dead, dead_counts

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def lists(self) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[Any]]:
        """Where each term's postings begin, and chunk and code of each. Raises DamagedFile: loops trust them."""
        starts, chunks, codes = self._starts.array, self._chunks.array, self._codes.array
        if starts[0] or starts[-1] != min(len(chunks), len(codes)) or np.any(starts[1:] < starts[:-1]):
            raise DamagedFile("postings.starts.npy is damaged: it does not fit the postings")
        return starts, chunks, codes

    def find(self, terms: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each term's postings begin and end, [terms, 2], and in how many living chunks it is."""
        numbers = np.array(self._terms.find(terms), np.int64)
        starts = self.lists[0]
        spans = np.empty((len(numbers), 2), np.int64)
        spans[:, 0], spans[:, 1] = starts[numbers], starts[numbers + 1]
        spans[numbers < 0] = 0
        frequencies = spans[:, 1] - spans[:, 0]
        if self._dead_counts is not None and len(self._dead_counts):
            frequencies -= np.where(numbers < 0, 0, self._dead_counts[numbers])
        return spans, frequencies

    def count_terms(self, texts: Sequence[Sequence[str]]) -> NDArray[np.int32]:
        """Return, for each term of the segment by number, how many of these analysed texts hold it."""
        counts = np.zeros(len(self._terms), np.int32)
        for terms in texts:
            counts[self._terms.find(sorted(set(terms)))] += 1
        return counts


class BM25:
    """Searches all segments, in corpus order, as one. `chunks` and `length` (in terms) count what is not deleted;
    `ranks` has the place of each position's id among all ids, which breaks ties."""

    def __init__(
        self, segments: Sequence[Postings], chunks: int, length: int, ranks: NDArray[np.int32], analyser: Analyser
    ) -> None:
        self._analyser, self._segments, self._chunks, self._ranks = analyser, segments, chunks, ranks
        self._firsts = np.cumsum([0, *map(len, segments)])
        mean = length / chunks if length else 1.0
        self._tables: list[NDArray[np.float32]] = []
        """For each segment, the share of a term's weight that each pair (occurrences, length) earns."""
        for segment in segments:
            counts, lengths = segment.pairs[:, 0].astype(np.float64), segment.pairs[:, 1]
            self._tables.append((counts / (counts + K1 * (1 - B + B * lengths / mean))).astype(np.float32))

    def search(
        self, query: str | Sequence[str], k: int, exclude: NDArray[np.int64] | None = None
    ) -> list[tuple[int, float]]:
        """Return the positions of the best `k` chunks for a text, or its terms, with their scores, in the total order.
        Chunks without a term are left out, and so are excluded positions, before the order is made."""
        terms = self._analyser.query_terms(query) if isinstance(query, str) else query
        if k < 1 or not terms:
            return []
        from harness1.retrieval.kernels import best

        counts = Counter(terms)
        found = [segment.find(list(counts)) for segment in self._segments]
        frequencies = sum((each for _, each in found), np.zeros(len(counts), np.int64))
        rarity = np.log1p((self._chunks - frequencies + 0.5) / (frequencies + 0.5))
        weights = (rarity * np.fromiter(counts.values(), np.float64, len(counts))).astype(np.float32)
        margin = 2 * STEP * float(weights.sum())
        ordered = None if exclude is None or not len(exclude) else np.sort(exclude)
        positions, scores = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for segment, (spans, _), table, first in zip(
            self._segments, found, self._tables, self._firsts.tolist(), strict=False
        ):
            gone = segment.dead
            if ordered is not None:
                low, high = np.searchsorted(ordered, (first, first + len(segment)))
                left_out = (ordered[low:high] - first).astype(np.uint32)
                gone = np.union1d(gone, left_out) if len(gone) else left_out
            _, chunks, codes = segment.lists
            places, their_scores = best(chunks, codes, spans, weights, table, len(segment), gone, k, margin)
            positions.append(places.astype(np.int64) + first)
            scores.append(their_scores)
        together, all_scores = np.concatenate(positions), np.concatenate(scores)
        order = best_first(all_scores, self._ranks[together], k)
        return list(zip(together[order].tolist(), all_scores[order].tolist(), strict=True))
