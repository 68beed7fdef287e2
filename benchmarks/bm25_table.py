"""The BM25 table of `retrieval.py`: every engine in its own process, searched in turn.

An engine builds in one process and is opened in another. The searches of all engines are interleaved, pass by pass,
so that other work on the machine affects them equally; the median pass of each counts.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.engines import BUILT_BY, ENGINES, disk_mb, peak_mb, resident_mb
from benchmarks.synthetic import chunk_number, queries

K, EXCLUDED, QUERIES, PASSES = 50, 300, 200, 5
SLOW = {"rank_bm25": 10}
"""Engines that are asked fewer queries."""

Row = dict[str, Any]


def bm25_table(seed: str, folder: Path, chunks: int, names: Sequence[str]) -> list[Row]:
    """Return a row for each engine: building, opening, searching with and without exclusions."""
    context = multiprocessing.get_context("spawn")
    rows: dict[str, Row] = {name: {"engine": name} for name in names}
    for name in names:
        if name not in BUILT_BY:
            rows[name] |= _in_process(context, _build, name, seed, folder, chunks)
            rows[name]["disk_mb"] = disk_mb(folder / name.split()[0])
    asked = queries(seed, chunks, QUERIES)
    workers = {name: _start(context, name, folder) for name in names}
    found: dict[str, list[list[int]]] = {}
    for name, (_, pipe) in workers.items():
        rows[name] |= pipe.recv()
        found[name] = _ask(pipe, asked[: SLOW.get(name)], [()] * QUERIES)[1]
    excluded = _exclusions(found[names[0]])
    passes: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(PASSES):
        for name, (_, pipe) in workers.items():
            some = asked[: SLOW.get(name)]
            passes[name].append((_ask(pipe, some, [()] * QUERIES)[0], _ask(pipe, some, excluded)[0]))
    for name, (process, pipe) in workers.items():
        rows[name]["ms"], rows[name]["excluding_ms"] = (
            statistics.median(side) for side in zip(*passes[name], strict=True)
        )
        rows[name]["agreement"] = _agreement(found[names[0]], found[name])
        pipe.send(None)
        rows[name]["mb_after"] = pipe.recv()
        process.join()
    for row in rows.values():
        for measure in ("ms", "excluding_ms"):
            row[f"{measure}_ratio"] = row[measure] / rows[names[0]][measure]
    return list(rows.values())


def _exclusions(found: list[list[int]]) -> list[list[int]]:
    """Return 300 chunks for each query: its own best 20, and the best of other queries."""
    others = [number for ranking in found for number in ranking[:20]]
    chosen = []
    for place, ranking in enumerate(found):
        rotated = others[place * 20 :] + others[: place * 20]
        chosen.append(list(dict.fromkeys(ranking[:20] + rotated))[:EXCLUDED])
    return chosen


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of our best ten that the other engine has among its best ten."""
    shares = [len(set(a[:10]) & set(b[:10])) / max(1, len(a[:10])) for a, b in zip(ours, theirs, strict=False)]
    return sum(shares) / len(shares)


def _in_process(context: Any, work: Any, *arguments: Any) -> Row:
    """Run a function in a separate process and return the result that it sends."""
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    row: Row = ours.recv()
    process.join()
    return row


def _build(pipe: Connection, name: str, seed: str, folder: Path, chunks: int) -> None:
    begin = time.perf_counter()
    ENGINES[name](folder).build(seed, chunks)
    pipe.send({"build_s": time.perf_counter() - begin, "build_mb": peak_mb()})


def _start(context: Any, name: str, folder: Path) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, folder), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection, name: str, folder: Path) -> None:
    """Open an engine, then answer passes of queries until told to stop."""
    engine = ENGINES[name](folder)
    begin = time.perf_counter()
    engine.open()
    pipe.send({"open_s": time.perf_counter() - begin, "mb_open": resident_mb()})
    while (work := pipe.recv()) is not None:
        work = [(terms, engine.named(exclude)) for terms, exclude in work]
        begin = time.perf_counter()
        found = [engine.search(terms, K, exclude) for terms, exclude in work]
        milliseconds = (time.perf_counter() - begin) / len(work) * 1000
        pipe.send((milliseconds, [list(map(chunk_number, names)) for names in found]))
    pipe.send(resident_mb())


def _ask(
    pipe: Connection, asked: Sequence[list[str]], excluded: Sequence[Sequence[int]]
) -> tuple[float, list[list[int]]]:
    pipe.send(list(zip(asked, excluded, strict=False)))
    answer: tuple[float, list[list[int]]] = pipe.recv()
    return answer
