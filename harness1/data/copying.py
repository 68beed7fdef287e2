"""Writes BEIR folders, which can be kept and changed: an official download, or any dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness1.data import beir
from harness1.data.benchmarks import Benchmark
from harness1.data.corpora import absent_gold, gold_ids
from harness1.data.open import open_source
from harness1.data.source import AbsentGold, Fault, Source, refuse
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
    source = open_source(f"{benchmark.name}:{path}", fault)
    inputs = {"benchmark": benchmark.name, "source": source.fingerprint, "format": FORMAT}
    stage = Stage(IMPORT, inputs | {"leave_out": fault is not refuse})
    if not force:
        refuse_other(stage, out, "import")
        if stage.is_done(out) and (found := read_stage(out)):
            return found.outputs
    tasks = [task for split in source.splits for task in source.tasks(split)]
    absent = {name for task in tasks for name in gold_ids(task.gold)} if source.has_documents else set()

    def keep_answerable() -> Iterator[Task]:
        """Yield the tasks that can be solved with the documents that were written."""
        for task in tasks:
            if missing := absent_gold(task.gold, absent) if task.gold else None:
                fault(AbsentGold(f"{path}: query {task.task_id!r} should find {missing}, which was left out"))
            else:
                yield task

    return _write(source, keep_answerable(), stage, out, absent, on_document)


def _write(
    source: Source, tasks: Iterable[Task], stage: Stage, out: Path, absent: set[str], on_document: Callable[[], None]
) -> dict[str, Any]:
    """Write documents and then tasks, without secret answers, and the card of the work; return the numbers of both.
    Ids that were written leave `absent`."""
    counts: dict[str, Any] = {"documents": 0, "tasks": dict.fromkeys(source.splits, 0)}

    def documents() -> Iterator[Document]:
        for document in source.documents() if source.has_documents else ():
            absent.difference_update((document.doc_id, *(chunk.chunk_id for chunk in document.chunks)))
            counts["documents"] += 1
            on_document()
            yield document

    def count_tasks() -> Iterator[Task]:
        for task in tasks:
            counts["tasks"][task.split] += 1
            yield without_answers(task) if source.secret_answers else task

    with under_way(stage, out):
        beir.write(out, documents(), count_tasks())
        stage.write(out, status="finished", outputs=counts)
    return counts


def without_answers(task: Task) -> Task:
    """Return a task as it may be written where the answers of its source are secret."""
    if task.gold is None:
        return task
    return msgspec.structs.replace(task, gold=msgspec.structs.replace(task.gold, answers=()))


COPY = "data copy"


def copy_dataset(
    spec: str, out: Path, *, force: bool = False, on_document: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write a dataset into a BEIR folder, if that is not done yet, without secret answers; return the numbers of
    documents, and of tasks in each split. `spec`: as `open_source` takes it. `force`: overwrite another copy. Raises
    CorpusError: the dataset is broken, or has no document; UsageError: there is no such dataset, or the folder holds
    something else or cannot be written."""
    source = open_source(spec)
    # Earlier copies name the limits of the part that they are.
    inputs = {"source": source.fingerprint, "limit": 0, "most_gold": 0}
    stage = Stage(COPY, {**inputs, "benchmark": source.name} if source.secret_answers else inputs)
    if not force:
        refuse_other(stage, out, "copy")
        if stage.is_done(out) and (found := read_stage(out)):
            return found.outputs
    if not source.has_documents:
        raise CorpusError(f"{spec} has no documents")
    clear(out, COPY, beir.CORPUS, beir.QUERIES, beir.QRELS, keep_card=True)
    tasks = (task for split in source.splits for task in source.tasks(split))
    return _write(source, tasks, stage, out, set(), on_document)
