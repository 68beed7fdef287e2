"""Datasets as wholes: what is wrong with them (broken lines, ids, texts, absent gold, questions in two splits), and
BEIR folders of them, which can be kept and changed."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness1.config import Data
from harness1.data import beir, tables
from harness1.data.benchmarks import READERS, Benchmark
from harness1.data.corpora import absent_gold, gold_ids
from harness1.data.leaks import KnownQueries
from harness1.data.open import open_source
from harness1.data.origins import origins_of_source
from harness1.data.source import AbsentGold, DuplicateId, EmptyText, Fault, NoGold, Source, refuse
from harness1.errors import CorpusError
from harness1.records import Record, Task
from harness1.retrieval.corpus import Document
from harness1.runs.files import Stage, clear, read_stage, refuse_other, under_way

SHOWN = 20
"""Examples in a finding."""
TRAIN = "train"
HELD_OUT = ("test", "dev")
"""Splits whose questions training must not see, and which must not repeat each other's."""
KINDS: dict[type[CorpusError], str] = {
    DuplicateId: "duplicate_id",
    EmptyText: "empty_text",
    AbsentGold: "absent_gold",
    NoGold: "no_gold",
}
FINDINGS = ("malformed", *KINDS.values(), "duplicate_text", "leak_exact", "leak_near", "left_out")
"""Every kind of finding."""


class DatasetFault(Record):
    """A kind of fault, how often it occurs, and its first few places."""

    kind: str
    count: int
    examples: tuple[str, ...]


class DatasetCheck(Record):
    """The result of a check; a sound dataset has no findings."""

    source: str
    documents: int
    chunks: int
    """Chunks of the dataset itself; 0 if it is cut when indexed."""
    tasks: dict[str, int]
    """The number of tasks in each split."""
    findings: tuple[DatasetFault, ...]


class _Findings:
    """Findings so far. Each fault counts once, even if several passes report it."""

    def __init__(self) -> None:
        self._messages: defaultdict[str, list[str]] = defaultdict(list)
        self._counts = Counter[str]()
        self._seen: set[int] = set()

    def fault(self, error: CorpusError) -> None:
        self.add(KINDS.get(type(error), "malformed"), str(error))

    def add(self, kind: str, message: str) -> None:
        if (name := hash((kind, message))) in self._seen:
            return
        self._seen.add(name)
        self._counts[kind] += 1
        if self._counts[kind] <= SHOWN:
            self._messages[kind].append(message)

    def list(self) -> tuple[DatasetFault, ...]:
        return tuple(DatasetFault(kind, self._counts[kind], tuple(shown)) for kind, shown in self._messages.items())


def check(spec: str, on_document: Callable[[], None] = lambda: None) -> DatasetCheck:
    """Check a dataset: all tasks, then one pass over the documents, of which only digests are kept. `spec`: as
    `open_source` takes it. `on_document`: called with each document that was looked at."""
    findings = _Findings()
    try:
        source = open_source(spec, findings.fault)
    except CorpusError as error:
        findings.fault(error)
        return DatasetCheck(spec, 0, 0, {}, findings.list())
    tasks: dict[str, list[Task]] = {split: [] for split in source.splits}
    for split in source.splits:
        try:
            tasks[split] = source.tasks(split)
        except CorpusError as error:
            findings.fault(error)
    everything = [*chain.from_iterable(tasks.values())]
    wanted = {name for task in everything for name in gold_ids(task.gold)}
    documents, chunks = _read(source, wanted, findings, on_document)
    _check_gold(source, everything, wanted if source.has_documents else set(), findings)
    _check_leaks(tasks, findings)
    counts = {split: len(each) for split, each in tasks.items()}
    return DatasetCheck(spec, documents, chunks, counts, findings.list())


def _read(source: Source, wanted: set[str], findings: _Findings, on_document: Callable[[], None]) -> tuple[int, int]:
    """Take documents found from `wanted`, or all if the pass was cut short; return the numbers of documents and
    chunks."""
    texts: dict[bytes, str] = {}
    documents = chunks = 0
    try:
        for document in source.documents() if source.has_documents else ():
            documents, chunks = documents + 1, chunks + len(document.chunks)
            wanted.difference_update((document.doc_id, *(chunk.chunk_id for chunk in document.chunks)))
            if not document.text.strip():
                findings.add("empty_text", f"document {document.doc_id!r} has a title and no text")
            else:
                words = " ".join(f"{document.title}\n{document.text}".casefold().split())
                digest = hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=12).digest()
                first = texts.setdefault(digest, document.doc_id)
                if first != document.doc_id:
                    findings.add("duplicate_text", f"document {document.doc_id!r} has the text of {first!r}")
            on_document()
    except CorpusError as error:
        findings.fault(error)
        wanted.clear()
    for problem in source.problems:
        findings.add("left_out", problem)
    return documents, chunks


def _check_gold(source: Source, tasks: list[Task], absent: set[str], findings: _Findings) -> None:
    """Look for gold that is absent or empty, and name its place where queries have one: in BEIR layout."""
    path = tables.find_file(source.root, beir.QUERIES) if tasks and source.kind == "beir" and source.root else None
    places: dict[str, str] = {}
    for where, row in tables.rows([path], findings.fault) if path else ():
        with suppress(CorpusError):  # reported when the tasks were read
            places.setdefault(tables.identifier(where, row), f"{where}: ")
    for task in tasks:
        asked = f"{places.get(task.task_id, '')}query {task.task_id!r}"
        if task.gold is None or not task.gold.relevant:
            findings.add("no_gold", f"{asked} names nothing to find")
        elif missing := absent_gold(task.gold, absent):
            findings.add("absent_gold", f"{asked} should find {missing}, which is not there")
    judged = {task.task_id for task in tasks}
    for task_id, where in places.items():
        if task_id not in judged:
            findings.add("no_gold", f"{where}query {task_id!r} has no relevant document in any split")


def _check_leaks(tasks: dict[str, list[Task]], findings: _Findings) -> None:
    known = KnownQueries(Data().near)
    for split in (*HELD_OUT, TRAIN):
        here = [(f"{split}/{task.task_id}", task.query) for task in tasks.get(split, ())]
        for name, query in here:
            if first := known.equal(query):
                findings.add("leak_exact", f"{name} asks what {first} does")
            elif near := known.match(query):
                findings.add("leak_near", f"{name} asks nearly what {near} does")
        for name, query in here if split != TRAIN else ():
            known.add(name, query)


IMPORT, COPY = "data import", "data copy"
FORMAT = 1
"""Counts changes in the files that an import writes."""


def import_benchmark(
    benchmark: Benchmark,
    path: Path,
    out: Path,
    *,
    fault: Fault = refuse,
    force: bool = False,
    on_document: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write an official download as `copy_dataset` does. `fault`: handles broken lines and absent gold, which raise
    CorpusError unless it lets them pass."""
    source = READERS[benchmark.name](path, fault)
    inputs = {"benchmark": benchmark.name, "source": source.fingerprint, "format": FORMAT}
    return _write(source, Stage(IMPORT, inputs | {"leave_out": fault is not refuse}), out, fault, force, on_document)


def copy_dataset(
    spec: str, out: Path, *, force: bool = False, on_document: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write a dataset into a BEIR folder, if that is not done yet, without secret answers; return the numbers of
    documents, and of tasks in each split. `spec`: as `open_source` takes it. `force`: overwrite another copy."""
    source = open_source(spec)
    # Earlier copies name the limits of the part that they are.
    inputs = {"source": source.fingerprint, "limit": 0, "most_gold": 0}
    inputs |= {"benchmark": source.name} if source.secret_answers else {}
    if not source.has_documents:
        next(source.documents())  # says what to do without them
    return _write(source, Stage(COPY, inputs), out, refuse, force, on_document)


def _write(
    source: Source, stage: Stage, out: Path, fault: Fault, force: bool, on_document: Callable[[], None]
) -> dict[str, Any]:
    """Write documents and then the tasks that they can solve, and the card of the work; return the numbers of both."""
    stage = replace(stage, origins=origins_of_source(source))
    if not force:
        refuse_other(stage, out, stage.verb.removeprefix("data "))
        if stage.is_done(out) and (found := read_stage(out)):
            return found.outputs
    tasks = [task for split in source.splits for task in source.tasks(split)]
    absent = {name for task in tasks for name in gold_ids(task.gold)} if source.has_documents else set()
    counts: dict[str, Any] = {"documents": 0, "tasks": dict.fromkeys(source.splits, 0)}

    def documents() -> Iterator[Document]:
        for document in source.documents() if source.has_documents else ():
            absent.difference_update((document.doc_id, *(chunk.chunk_id for chunk in document.chunks)))
            counts["documents"] += 1
            on_document()
            yield document
        if source.has_documents and not counts["documents"]:
            raise CorpusError(f"{source.label} holds no documents")

    def solvable() -> Iterator[Task]:
        for task in tasks:
            if fault is not refuse and task.gold and (missing := absent_gold(task.gold, absent)):
                fault(AbsentGold(f"{source.label}: query {task.task_id!r} should find {missing}, which was left out"))
            else:
                counts["tasks"][task.split] += 1
                yield (
                    replace(task, gold=replace(task.gold, answers=())) if source.secret_answers and task.gold else task
                )

    clear(out, stage.verb, beir.CORPUS, beir.QUERIES, beir.QRELS, keep_card=True)
    with under_way(stage, out):
        beir.write(out, documents(), solvable())
        stage.write(out, status="finished", outputs=counts)
    return counts
