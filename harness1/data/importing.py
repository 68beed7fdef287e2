"""Checks an official download and converts it into a BEIR folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness1.data.benchmarks.benchmark import absent_gold, gold_ids
from harness1.data.benchmarks.registry import Benchmark
from harness1.data.faults import AbsentGold, Fault, refuse
from harness1.data.formats import beir
from harness1.records import Task
from harness1.retrieval.corpus import Document
from harness1.runs.stage import Stage, read_stage, refuse_other, under_way

VERB = "data import"
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
    """Write documents, questions and judgements of an official download as a BEIR folder, if that is not done yet.

    Answers are written with the questions, except for a benchmark that asks to keep them secret.

    Args:
        fault: handles broken lines and absent gold.
        force: overwrite another import in the folder.

    Returns:
        The numbers of documents, and of tasks in each split, that the folder holds.

    Raises:
        CorpusError: the download is broken, or has nothing to write.
        UsageError: the folder holds something else, or cannot be written.
    """
    source = benchmark.open(path, fault)
    inputs = {"benchmark": benchmark.name, "source": source.fingerprint, "format": FORMAT}
    stage = Stage(VERB, inputs | {"leave_out": fault is not refuse})
    if stage.is_done(out) and not force:
        return _found(out)
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


def _found(out: Path) -> dict[str, Any]:
    found = read_stage(out)
    assert found is not None  # its work was found done
    return found.outputs


def without_answers(task: Task) -> Task:
    """Return a task as it may be written where the answers of its source are secret."""
    if task.gold is None:
        return task
    return msgspec.structs.replace(task, gold=msgspec.structs.replace(task.gold, answers=()))
