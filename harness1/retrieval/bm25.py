"""The postings of a segment: written in runs of bounded memory that are merged at the end, then memory-mapped.

    terms.*                 the terms (`harness1.retrieval.files.Keys`)
    postings.starts.npy     [terms + 1] where the postings of each term begin
    postings.chunks.npy     the chunks of each term, ascending
    postings.codes.npy      for each posting its pair (occurrences of the term, length of the chunk): a row of
    postings.pairs.npy      [pairs, 2]
    postings.lengths.npy    [chunks] length of each chunk in terms

Building by sorted runs: Heinz and Zobel, "Efficient single-pass index construction for text databases", JASIST 2003.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness1.retrieval.corpus import Analyser, Vocabulary
from harness1.retrieval.files import DamagedFile, Files, Keys, write_keys
from harness1.retrieval.protocol import STEP, best_first

RUN_WORDS = 1 << 23
"""Words inverted at a time, in memory."""
NARROW_CODES = 1 << 16
"""The number of pairs that codes of 16 bits can tell apart."""


class PostingsWriter:
    """Takes the texts of all chunks in order, then writes their postings."""

    def __init__(self, folder: Path, analyser: Analyser) -> None:
        self._folder = folder
        self._vocabulary = Vocabulary(analyser)
        self._numbers, self._sizes = array("i"), array("i")
        self._lengths = array("i")
        self._pairs = _Pairs()
        self._runs: list[Path] = []

    def add(self, text: str) -> None:
        self._sizes.append(self._vocabulary.number(text, self._numbers))
        if len(self._numbers) >= RUN_WORDS:
            self._write_run()

    def finish(self) -> int:
        """Write all files, and return the total length of all chunks, in terms."""
        self._write_run()
        np.save(self._folder / "postings.lengths.npy", np.array(self._lengths, np.int32))
        np.save(self._folder / "postings.pairs.npy", self._pairs.rows)
        write_keys(self._folder, "terms", list(self._vocabulary.terms))
        self._merge_runs()
        return sum(self._lengths)

    def _write_run(self) -> None:
        from harness1.retrieval.kernels import count_terms, invert

        vocabulary = len(self._vocabulary.terms)
        last, slots = np.full(vocabulary, -1, np.int32), np.empty(vocabulary, np.int32)
        numbers, sizes = np.array(self._numbers, np.int32), np.array(self._sizes, np.int32)
        terms, counts, distinct, lengths = count_terms(numbers, sizes, last, slots)
        codes = self._pairs.encode(counts, distinct, lengths)
        run = self._folder / f"run-{len(self._runs)}"
        run.mkdir()
        starts, chunks, codes = invert(terms, codes, distinct, len(self._lengths), vocabulary)
        for name, values in (("starts", starts), ("chunks", chunks), ("codes", codes)):
            np.save(run / f"{name}.npy", values)
        self._runs.append(run)
        self._lengths.extend(lengths.tolist())
        self._numbers, self._sizes = array("i"), array("i")

    def _merge_runs(self) -> None:
        """Join the runs of postings of each term."""
        from harness1.retrieval.kernels import append_run

        runs = [np.load(run / "starts.npy") for run in self._runs]
        starts = np.zeros(len(self._vocabulary.terms) + 1, np.int64)
        for run_starts in runs:
            starts[1 : len(run_starts)] += np.diff(run_starts)
        starts = np.cumsum(starts)
        np.save(self._folder / "postings.starts.npy", starts)
        codes = np.uint16 if len(self._pairs.rows) <= NARROW_CODES else np.uint32
        for name, kind in (("chunks", np.uint32), ("codes", codes)):
            ends, out = starts[:-1].copy(), _new_array(self._folder / f"postings.{name}.npy", kind, int(starts[-1]))
            for run, run_starts in zip(self._runs, runs, strict=True):
                append_run(ends, out, run_starts, np.load(run / f"{name}.npy"))
                (run / f"{name}.npy").unlink()
        for run in self._runs:
            (run / "starts.npy").unlink()
            run.rmdir()


class _Pairs:
    """The pairs (occurrences, length) seen so far; the code of a pair is its row."""

    def __init__(self) -> None:
        self._rows, self._known = np.zeros((1 << 11, 2), np.int32), 0
        self._slots = np.full(1 << 12, -1, np.int32)

    @property
    def rows(self) -> NDArray[np.int32]:
        return self._rows[: self._known]

    def encode(
        self, counts: NDArray[np.int32], distinct: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> NDArray[np.uint32]:
        """Return the code of every posting of consecutive chunks; the hash table grows until it holds all pairs."""
        from harness1.retrieval.kernels import encode

        while True:
            codes, known = encode(counts, distinct, lengths, self._rows, self._known, self._slots)
            if 2 * known <= len(self._slots):
                self._known = known
                return np.asarray(codes, np.uint32)
            old = self._rows[: known - 1]
            self._rows, self._slots = (
                np.zeros((len(self._slots), 2), np.int32),
                np.full(len(self._slots) * 2, -1, np.int32),
            )
            old_counts, old_lengths = np.ascontiguousarray(old[:, 0]), np.ascontiguousarray(old[:, 1])
            self._known = encode(old_counts, np.ones(len(old), np.int32), old_lengths, self._rows, 0, self._slots)[1]


class Postings:
    """The memory-mapped postings of one segment.

    Args:
        dead: sorted chunks of the segment that were deleted.
        dead_counts: for each term, by number, in how many deleted chunks it occurs.
    """

    def __init__(self, files: Files, dead: NDArray[np.uint32], dead_counts: NDArray[np.int32] | None) -> None:
        self._terms = Keys(files, "terms")
        self._starts = files.array("postings.starts.npy")
        self._lengths = files.array("postings.lengths.npy")
        self._chunks, self._codes = files.array("postings.chunks.npy"), files.array("postings.codes.npy")
        self._verified = bytearray(len(self._terms))
        self._dead_counts = dead_counts
        self.chunks, self.codes = self._chunks.values, self._codes.values
        self.pairs = files.load("postings.pairs.npy")
        self.dead = dead

    def __len__(self) -> int:
        return len(self._lengths.values)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """The length of each chunk in terms."""
        return self._lengths.whole()

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where the postings of each term begin and the last ones end.

        Raises:
            DamagedFile: they are not as they were written, or not within the postings.
        """
        starts = self._starts.whole()
        if starts[0] or starts[-1] != min(len(self.chunks), len(self.codes)) or np.any(starts[1:] < starts[:-1]):
            raise DamagedFile("postings.starts.npy is damaged: it does not fit the postings")
        return starts

    def numbers(self, terms: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of each term, -1 if no chunk has it."""
        return np.array(self._terms.find(terms), np.int64)

    def spans(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the postings of each term begin and end, shape [terms, 2]; both are 0 for terms without
        postings. These postings are verified, because compiled loops trust them.

        Raises:
            DamagedFile: they are not as they were written.
        """
        spans = np.empty((len(numbers), 2), np.int64)
        spans[:, 0], spans[:, 1] = self.starts[numbers], self.starts[numbers + 1]
        spans[numbers < 0] = 0
        for number, (start, stop) in zip(numbers.tolist(), spans.tolist(), strict=True):
            if number >= 0 and not self._verified[number]:
                self._chunks.check(start, stop)
                self._codes.check(start, stop)
                self._verified[number] = 1
        return spans

    def frequencies(self, numbers: NDArray[np.int64], spans: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of living chunks in which each term occurs."""
        frequencies = spans[:, 1] - spans[:, 0]
        if self._dead_counts is not None and len(self._dead_counts):
            frequencies -= np.where(numbers < 0, 0, self._dead_counts[numbers])
        return frequencies

    def count_terms(self, texts: Sequence[Sequence[str]]) -> NDArray[np.int32]:
        """Return, for each term of the segment by number, how many of these analysed texts hold it."""
        counts = np.zeros(len(self._terms), np.int32)
        for terms in texts:
            counts[self._terms.find(sorted(set(terms)))] += 1
        return counts


def _new_array(path: Path, kind: Any, size: int) -> NDArray[Any]:
    """Create a one-dimensional array in a new `.npy` file, mapped for writing.

    Raises:
        OSError: the disk is full. If the space were not reserved now, a signal would kill the process later.
    """
    if not size:  # an empty file cannot be mapped
        np.save(path, np.empty(0, kind))
        return np.empty(0, kind)
    mapped = np.lib.format.open_memmap(path, "w+", dtype=kind, shape=(size,))
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return mapped


NONE = np.empty(0, np.uint32)


class BM25:
    """Searches all segments as one.

    Args:
        segments: in corpus order; positions are numbered through all of them.
        chunks: the number of chunks that are not deleted.
        length: their total length, in terms.
        ranks: for each position, the place of its id among all ids in lexicographic order; it breaks ties.
    """

    def __init__(
        self,
        segments: Sequence[Postings],
        chunks: int,
        length: int,
        ranks: NDArray[np.int32],
        k1: float,
        b: float,
        analyser: Analyser,
    ) -> None:
        self._analyser = analyser
        self._segments = segments
        self._firsts = np.cumsum([0, *map(len, segments)])
        self._chunks = chunks
        self._ranks = ranks
        mean = length / chunks if length else 1.0
        self._tables = [_shares(segment.pairs, mean, k1, b) for segment in segments]

    def search(self, query: str, k: int, exclude: NDArray[np.int64] | None = None) -> list[tuple[int, float]]:
        """Return the positions of the best `k` chunks with their scores, in the total order
        (`harness1.retrieval.protocol`).

        Chunks without a term of the query are left out. So are excluded chunks (by position), which do not count for
        the top score either, to which the order is relative.
        """
        return self.search_terms(self._analyser.terms(query), k, exclude)

    def search_terms(
        self, terms: Sequence[str], k: int, exclude: NDArray[np.int64] | None = None
    ) -> list[tuple[int, float]]:
        """Search for a query that is already analysed."""
        if k < 1 or not terms:
            return []
        from harness1.retrieval.kernels import best

        counts = Counter(terms)
        numbers = [segment.numbers(list(counts)) for segment in self._segments]
        spans = [segment.spans(found) for segment, found in zip(self._segments, numbers, strict=True)]
        weights = self._weights(counts, numbers, spans)
        margin = 2 * STEP * float(weights.sum())
        positions, scores = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for segment, span, table, first in zip(
            self._segments, spans, self._tables, self._firsts.tolist(), strict=False
        ):
            left_out = _local(exclude, first, len(segment))
            found, found_scores = best(
                segment.chunks, segment.codes, span, weights, table, len(segment), segment.dead, left_out, k, margin
            )
            positions.append(found.astype(np.int64) + first)
            scores.append(found_scores)
        together, their_scores = np.concatenate(positions), np.concatenate(scores)
        order = best_first(their_scores, self._ranks[together], k)
        return list(zip(together[order].tolist(), their_scores[order].tolist(), strict=True))

    def _weights(
        self, counts: Counter[str], numbers: list[NDArray[np.int64]], spans: list[NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        """Return the weight of each term: its inverse document frequency, times its occurrences in the query."""
        frequencies = np.zeros(len(counts), np.int64)
        for segment, found, span in zip(self._segments, numbers, spans, strict=True):
            frequencies += segment.frequencies(found, span)
        rarity = np.log1p((self._chunks - frequencies + 0.5) / (frequencies + 0.5))
        return (rarity * np.fromiter(counts.values(), np.float64, len(counts))).astype(np.float32)


def _shares(pairs: NDArray[np.int32], mean: float, k1: float, b: float) -> NDArray[np.float32]:
    """Return the share of a term's weight that each pair (occurrences, length) earns."""
    counts, lengths = pairs[:, 0].astype(np.float64), pairs[:, 1]
    return (counts / (counts + k1 * (1 - b + b * lengths / mean))).astype(np.float32)


def _local(positions: NDArray[np.int64] | None, first: int, size: int) -> NDArray[np.uint32]:
    """Return the positions within a segment, as sorted chunk numbers of it."""
    if positions is None or not len(positions):
        return NONE
    ordered = np.sort(positions)
    low, high = np.searchsorted(ordered, (first, first + size))
    return (ordered[low:high] - first).astype(np.uint32)
