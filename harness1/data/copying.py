"""Writes BEIR folders, which can be kept and changed: an official download, any dataset, or part of its tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness1.data import beir
from harness1.data.benchmarks import Benchmark
from harness1.data.corpora import absent_gold, gold_ids
from harness1.data.open import open_source
from harness1.data.source import AbsentGold, Fault, refuse
from harness1.errors import CorpusError
from harness1.records import Task
from harness1.retrieval.corpus import Document
from harness1.runs.files import Stage, clear, read_stage, refuse_other, under_way

IMPORT = "data import"
FORMAT = 1
"""Counts changes in the files that are written."""


def import_benchmark(
    benchmark: Benchmark,
    path: Path,
    out: Path,
    *,
    fault: Fault = refuse,
    force: bool = False,
    on_document: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write an official download as a BEIR folder, if that is not done yet, without answers that are to be kept secret;
    return the numbers of documents, and of tasks in each split. `fault`: handles broken lines and absent gold. `force`:
    overwrite another import. Raises CorpusError: the download is broken, or has nothing to write; UsageError: the
    folder holds something else, or cannot be written."""
    source = benchmark.open(path, fault)
    inputs = {"benchmark": benchmark.name, "source": source.fingerprint, "format": FORMAT}
    stage = Stage(IMPORT, inputs | {"leave_out": fault is not refuse})
    if not force and stage.is_done(out) and (found := read_stage(out)):
        return found.outputs
    if not force:
        refuse_other(stage, out, "import")
    tasks = [task for split in source.splits for task in source.tasks(split)]
    absent = {name for task in tasks for name in gold_ids(task.gold)}
    counts: dict[str, Any] = {"documents": 0, "tasks": dict.fromkeys(source.splits, 0)}

    def documents() -> Iterator[Document]:
        for document in source.documents() if source.has_documents else ():
            absent.difference_update((document.doc_id, *(chunk.chunk_id for chunk in document.chunks)))
            counts["documents"] += 1
            on_document()
            yield document

    def answerable() -> Iterator[Task]:
        """Yield the tasks that can be solved with the documents that were written."""
        for task in tasks:
            missing = absent_gold(task.gold, absent) if task.gold and source.has_documents else None
            if missing:
                fault(AbsentGold(f"{path}: query {task.task_id!r} should find {missing}, which was left out"))
                continue
            counts["tasks"][task.split] += 1
            yield without_answers(task) if source.secret_answers else task

    with under_way(stage, out):
        beir.write(out, documents(), answerable())
        stage.write(out, status="finished", outputs=counts)
    return counts


def without_answers(task: Task) -> Task:
    """Return a task as it may be written where the answers of its source are secret."""
    if task.gold is None:
        return task
    return msgspec.structs.replace(task, gold=msgspec.structs.replace(task.gold, answers=()))


COPY = "data copy"


def copy_dataset(
    spec: str,
    out: Path,
    *,
    limit: int = 0,
    most_gold: int = 0,
    force: bool = False,
    on_document: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write a dataset into a BEIR folder, if that is not done yet, without secret answers; return the numbers of
    documents, and of tasks in each split. `spec`: as `open_source` takes it. `limit`: take only the first tasks of each
    split; 0 means all. `most_gold`: leave out tasks with more relevant documents; 0 means none. `force`: overwrite
    another copy. Raises CorpusError: the dataset is broken, or has no document; UsageError: there is no such dataset,
    or the folder holds something else or cannot be written."""
    source = open_source(spec)
    inputs = {"source": source.fingerprint, "limit": limit, "most_gold": most_gold}
    stage = Stage(COPY, {**inputs, "benchmark": source.name} if source.secret_answers else inputs)
    if not force:
        refuse_other(stage, out, "copy")
        if stage.is_done(out) and (found := read_stage(out)):
            return found.outputs
    clear(out, COPY, beir.CORPUS, beir.QUERIES, beir.QRELS, keep_card=True)
    most = most_gold or sys.maxsize
    tasks: dict[str, list[Task]] = {}
    for split in source.splits:
        few = [each for each in source.tasks(split) if not each.gold or len(each.gold.relevant) <= most]
        tasks[split] = [without_answers(each) if source.secret_answers else each for each in few[: limit or None]]
    counts: dict[str, Any] = {"documents": 0, "tasks": {split: len(each) for split, each in tasks.items()}}

    def documents() -> Iterator[Document]:
        for document in source.documents():
            counts["documents"] += 1
            on_document()
            yield document

    with under_way(stage, out):
        beir.write(out, documents(), (task for split in tasks.values() for task in split))
        if not counts["documents"]:
            raise CorpusError(f"{spec} has no documents")
        stage.write(out, status="finished", outputs=counts)
    return counts
