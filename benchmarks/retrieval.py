"""Measure the cost of searching, and what is found in a messy folder, beside peers.

bm25  building, opening and searching, beside bm25s, tantivy and rank_bm25: each engine builds in one process and is
      opened in another; searches of all engines are interleaved, pass by pass, and the median pass of each counts
grep  rare literals beside plain scans by RE2 of the same bytes, and patterns designed to be slow
folder  the files of a messy folder that its questions ask for: the script, one search of ours, bm25s, and files by how
      many words of the question they hold, as ripgrep counts them, all over the same texts and with sets of equal size

python benchmarks/retrieval.py bm25 grep --seed $DATA/hotpotqa --chunks 1000000
python benchmarks/retrieval.py folder --draw 1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import re2

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.engines import BUILT_BY, ENGINES, Ours, chunk_number, disk_mb, peak_mb, queries, resident_mb
from benchmarks.systems import SINGLE
from harness1.config import load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.statistics import RESAMPLES, bootstrap_mean, paired_difference
from harness1.records import Task
from harness1.retrieval.corpus import Document
from harness1.retrieval.grep import grep_segments
from harness1.retrieval.index import EmbeddedIndex, open_index
from harness1.retrieval.protocol import BadPattern, RetrievalFault
from harness1.runs.journal import read_episodes
from harness1.words import STOP_WORDS
from tests.data.messy_folder import write_folder

TABLES = ("bm25", "grep", "folder")
MADE_UP = "world:300"
"""The default source of texts and questions."""
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure and print; return what `--json` prints."""
    options = _options(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="retrieval-"))
    try:
        report = {name: rows for table in options.tables for name, rows in _measure(table, folder, options).items()}
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    if options.json:
        print(json.dumps(report))
    else:
        print("\n\n".join(_table(name, rows) for name, rows in report.items()))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="retrieval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of {', '.join(TABLES)}; without, all")
    parser.add_argument("--seed", default=MADE_UP, help="the corpus that is varied")
    parser.add_argument("--chunks", type=int, default=100_000, help="size of the corpus")
    parser.add_argument("--draw", type=int, default=0, help="decides the files around those that are asked for")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="rows of the bm25 table")
    parser.add_argument("--folder", type=Path, help="keep indexes here, and use those that are there")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    options = parser.parse_args(arguments)
    options.tables = options.tables or TABLES
    for table in options.tables:
        if table not in TABLES:
            parser.error(f"there is no table {table!r}; choose from {', '.join(TABLES)}")
    if "ours" not in options.engines:
        parser.error("the others are measured beside ours: name it among the engines")
    return options


def _measure(table: str, folder: Path, options: argparse.Namespace) -> dict[str, list[Row]]:
    if table == "bm25":
        names = sorted(options.engines, key=list(ENGINES).index)
        return {"bm25": bm25_table(options.seed, _sized(folder, options), options.chunks, names)}
    if table == "folder":
        return folder_tables(folder / f"messy-{options.draw}", AROUND, options.draw)
    built = _sized(folder, options)
    if not (built / "ours").exists():
        Ours(built).build(options.seed, options.chunks)
    index = open_built(built)
    return {"grep": rare_table(index), "hostile": hostile_table(index)}


def _sized(folder: Path, options: argparse.Namespace) -> Path:
    """Return the folder for indexes of this size; each size has its own."""
    sized: Path = folder / str(options.chunks)
    return sized


def _table(name: str, rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join([name, *lines])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


K, EXCLUDED, QUERIES, PASSES = 50, 300, 200, 5
SLOW = {"rank_bm25": 10}
"""Engines that are asked fewer queries."""


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


LITERALS, RARE, REPEATS, ALL, FIRST = 8, 10, 9, 10**9, 5
HOSTILE = [
    "(a+)+$", "(a|a)*b", r"([a-z]+)*\d", r"(\w+\s?)*$^", "(.*)*x", r"(x+x+)+y\x01",
    "(a?){500}a{500}", r"(\w?){500}\w{500}", "((a{100}){10}){1}", r"(.*){200}\x01", "(a|b)*a(a|b){20}",
    r"[a-m][a-z ,]{20}\x01", r"[a-m].{12}\x01", r"[a-m].{40}\x01", "." * 900 + r"\x01", "a" + "." * 900 + r"\x01",
    r"the.{1,300}\x01", r"(the|and).{400}\x01", r"in.{0,50}on.{0,50}\x01", r"(\w{1,20} ){5}\x01",
    r"\pL{40}\x01", r"(\pL{1,20}){1,9}\x01", "(" * 200 + "a+" + ")+" * 200, "|".join(f"w{at}" for at in range(10_000)),
    "|".join(f"{at}.{at}" for at in range(120)), r"\d{9}\d*\x01",
]  # fmt: skip
"""Nested quantifiers, thousands of alternatives, huge repeats, gaps without a literal: alone, or before a byte that no
text has."""
Found = list[tuple[int, int]]


def rare_table(index: EmbeddedIndex) -> list[Row]:
    """Return a row for each literal, with and without case: our milliseconds, and the scans' as multiples of ours."""
    literals = list(_rare_literals(index))
    return [_rare(index, prefix + literal) for prefix in ("", "(?i)") for literal in literals]


def hostile_table(index: EmbeddedIndex) -> list[Row]:
    """Return a row for each pattern, compiled anew: milliseconds, and the result."""
    rows = []
    for pattern in HOSTILE:
        times = []
        for _ in range(3):
            re2.purge()
            milliseconds, found = _timed(_ours, index, pattern, FIRST)
            times.append(milliseconds)
        outcome = found.reason if isinstance(found, BadPattern) else f"{len(found)} matches"
        shown = pattern if len(pattern) <= 40 else f"{pattern[:30]}... ({len(pattern)} characters)"
        rows.append({"pattern": shown, "ms": max(times), "outcome": outcome})
    return rows


def open_built(folder: Path) -> EmbeddedIndex:
    """Open the index that the BM25 table built in a folder, or build it there."""
    return open_index(folder / "ours")


def _rare_literals(index: EmbeddedIndex) -> Iterator[str]:
    """Yield long words from randomly drawn chunks that occur in few chunks."""
    rng, given = random.Random(len(index)), 0
    for position in iter(lambda: rng.randrange(len(index)), None):
        words = [word for word in index.chunk(position).text.split() if word.isascii() and word.isalpha()]
        longest = max(words, key=len, default="")
        if len(longest) >= 8 and 0 < len(_ours(index, longest, RARE + 1)) <= RARE:
            yield longest
            given += 1
        if given == LITERALS:
            return


def _rare(index: EmbeddedIndex, pattern: str) -> Row:
    """Measure a pattern: medians of interleaved runs, so that other work on the machine affects all equally."""
    whole, single = _compiled(pattern), _compiled(pattern)
    times: dict[str, list[float]] = {"all": [], "first": [], "scan": []}
    found: Found = []
    for repeat in range(REPEATS):
        milliseconds, found = _timed(_ours, index, pattern, ALL)
        times["all"].append(milliseconds)
        times["first"].append(_timed(_ours, index, pattern, FIRST)[0])
        if repeat % 3 == 0:
            milliseconds, scanned = _timed(_scan, index, whole)
            assert found == scanned, pattern
            times["scan"].append(milliseconds)
    ours, first, scan = (statistics.median(each) for each in times.values())
    chunkwise = _timed(_chunk_by_chunk, index, single)[0]
    return {
        "pattern": pattern,
        "hits": len(found),
        "ms": ours,
        "first_5_ms": first,
        "scan_ms": scan,
        "scan_ratio": scan / ours,
        "chunk_by_chunk_ms": chunkwise,
        "chunk_by_chunk_ratio": chunkwise / ours,
    }


def _ours(index: EmbeddedIndex, pattern: str, limit: int) -> Any:
    steps = grep_segments(index.segments, pattern, limit, deadline=60.0)
    result = None
    while result is None:
        try:
            next(steps)
        except StopIteration as stop:
            result = stop.value
    assert not isinstance(result, RetrievalFault), result
    return result


def _scan(index: EmbeddedIndex, pattern: Any) -> Found:
    """Scan the bytes of each segment in one pass. No match crosses the border between adjacent chunks:
    the literals are words, and chunks are texts."""
    found: Found = []
    for number, segment in enumerate(index.segments):
        starts = [match.start() for match in pattern.finditer(segment.contents.bytes)]
        positions = np.unique(np.searchsorted(segment.contents.ends, starts, side="right") - 1)
        found += [(number, position) for position in positions.tolist()]
    return found


def _chunk_by_chunk(index: EmbeddedIndex, pattern: Any) -> Found:
    return [
        (number, position)
        for number, segment in enumerate(index.segments)
        for position in range(len(segment.contents))
        if pattern.search(segment.contents.view(position))
    ]


def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    return re2.compile(pattern, options)


def _timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work(*arguments)
    return (time.perf_counter() - begin) * 1000, result


AROUND, FIRST_FILES, SET = 300, 3, 30
Rankings = dict[str, list[str]]  # the names of files for each question, best first


def folder_tables(folder: Path, around: int, draw: int) -> dict[str, list[Row]]:
    """Return a row for each system: the shares of questions whose file is among its first three, and in its set, which
    is for each question as large as the script's, with 95 % intervals, and how much more the script finds; and a row
    for each question whose file is not among the first three of the script, with its place for each system."""
    tasks = write_folder(folder / "files", around, draw)
    source = open_source(str(folder / "files"), leave_out=True)
    documents = [*source.documents()]
    print("\n".join([*source.problems, *source.reading.lines()]), file=sys.stderr)
    ensure_index(source, folder / "index", load_config(None, []))
    found = {
        "script": _delivered(folder, "scripted", (), tasks),
        "one search": _delivered(folder, "single-shot", SINGLE, tasks),
        "bm25s": _by_bm25s(documents, tasks),
        "words counted": {task.task_id: _by_words(documents, task.query) for task in tasks},
    }
    gold = {task.task_id: name for task in tasks if task.gold for name in task.gold.relevant}
    places = {
        system: {task: _place(ranking, gold[task]) for task, ranking in each.items()} for system, each in found.items()
    }
    rows = list[Row]()
    limits = {
        "first_3": dict.fromkeys(gold, FIRST_FILES),
        "in_set": {task: len(found["script"][task]) for task in gold},
    }
    for system, of_task in places.items():
        rows.append({"system": system, "questions": len(gold)})
        for name, limit in limits.items():
            ours, theirs = (
                {task: float(0 < each[task] <= limit[task]) for task in gold} for each in (places["script"], of_task)
            )
            share, more = bootstrap_mean([*theirs.values()], RESAMPLES), paired_difference(ours, theirs, RESAMPLES)
            rows[-1] |= {name: share.mean, f"{name}_from": share.low, f"{name}_to": share.high}
            rows[-1] |= {f"{name}_behind": more.mean, f"{name}_behind_from": more.low, f"{name}_behind_to": more.high}
    missed = [
        {"file": gold[task.task_id], "question": task.query}
        | {name: each[task.task_id] for name, each in places.items()}
        for task in tasks
        if not 0 < places["script"][task.task_id] <= FIRST_FILES
    ]
    return {"folder": rows, "missed": missed}


def _place(ranking: list[str], name: str) -> int:
    """Return the place of a file, counted from 1; 0 if it is not there."""
    return ranking.index(name) + 1 if name in ranking else 0


def _delivered(folder: Path, policy: str, settings: Sequence[str], tasks: Sequence[Task]) -> Rankings:
    """Play a policy, and return the files of its sets in their order."""
    config = load_config(None, ["env.retrieval.mode=bm25", *settings])
    run = folder / policy
    ensure_run(Evaluation(str(folder / "files"), "test", tasks, str(folder / "index"), policy, config), run)
    return {each.task.task_id: [str(unit.unit_id) for unit in each.curated] for each in read_episodes(run)}


def _by_bm25s(documents: Sequence[Document], tasks: Sequence[Task]) -> Rankings:
    import bm25s
    import Stemmer

    def terms(texts: list[str]) -> Any:
        stemmer = Stemmer.Stemmer("english")
        return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)

    model = bm25s.BM25()
    model.index(terms([f"{document.title} {document.text}" for document in documents]), show_progress=False)
    rankings = {}
    for task in tasks:
        places, scores = model.retrieve(terms([task.query]), k=min(SET, len(documents)), show_progress=False)
        pairs = zip(places[0].tolist(), scores[0].tolist(), strict=True)
        rankings[task.task_id] = [str(documents[place].doc_id) for place, score in pairs if score > 0]
    return rankings


def _by_words(documents: Sequence[Document], question: str) -> list[str]:
    """Return files by how many words of a question they hold, then by how often, then by name."""
    words = {*re.findall(r"\w+", question.lower())} - STOP_WORDS
    ranked = []
    for document in documents:
        text = f"{document.title} {document.text}".lower()
        counts = [text.count(word) for word in words]
        ranked.append((-sum(map(bool, counts)), -sum(counts), str(document.doc_id)))
    return [name for held, _, name in sorted(ranked)[:SET] if held]


if __name__ == "__main__":
    main()
