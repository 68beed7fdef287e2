"""Writes any dataset, or part of its tasks, as a BEIR folder, which can be kept, changed, and checked by its hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness1.data.formats import beir
from harness1.data.importing import without_answers
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import Task
from harness1.retrieval.corpus import Document
from harness1.runs.stage import Stage, clear, read_stage, refuse_other, under_way

VERB = "data copy"
FILES = (beir.CORPUS, beir.QUERIES, beir.QRELS)


def copy_dataset(
    spec: str,
    out: Path,
    *,
    limit: int = 0,
    most_gold: int = 0,
    force: bool = False,
    on_document: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write the documents and the tasks of a dataset into a BEIR folder, if that is not done yet; secret answers are
    left out.

    Args:
        spec: a dataset, as `open_source` takes it.
        limit: take only the first tasks of each split; 0 means all.
        most_gold: leave out tasks with more relevant documents; 0 means none.
        force: overwrite another copy in the folder.

    Returns:
        The numbers of documents, and of tasks in each split, that the folder holds.

    Raises:
        CorpusError: the dataset is broken, or has no document.
        UsageError: there is no such dataset, or the folder holds something else or cannot be written.
    """
    source = open_source(spec)
    inputs = {"source": source.fingerprint, "limit": limit, "most_gold": most_gold}
    stage = Stage(VERB, {**inputs, "benchmark": source.name} if source.secret_answers else inputs)
    if not force:
        refuse_other(stage, out, "copy")
        if stage.is_done(out) and (found := read_stage(out)) is not None:
            return found.outputs
    clear(out, VERB, *FILES, keep_card=True)
    documents, tasks = _Counted(source, on_document), _tasks(source, limit, most_gold)
    with under_way(stage, out):
        beir.write(out, documents.each(), (task for split in tasks.values() for task in split))
        if not documents.count:
            raise CorpusError(f"{spec} has no documents")
        counts = {"documents": documents.count, "tasks": {split: len(each) for split, each in tasks.items()}}
        stage.write(out, status="finished", outputs=counts)
    return counts


def _tasks(source: Source, limit: int, most_gold: int) -> dict[str, list[Task]]:
    found = {}
    for split in source.splits:
        few = [task for task in source.tasks(split) if not most_gold or _gold(task) <= most_gold]
        few = few[: limit or None]
        found[split] = [without_answers(task) for task in few] if source.secret_answers else few
    return found


def _gold(task: Task) -> int:
    return len(task.gold.relevant) if task.gold else 0


class _Counted:
    """The documents of a source, counted while they are read."""

    def __init__(self, source: Source, on_document: Callable[[], None]) -> None:
        self.source, self.on_document, self.count = source, on_document, 0

    def each(self) -> Iterator[Document]:
        for document in self.source.documents():
            self.count += 1
            self.on_document()
            yield document
