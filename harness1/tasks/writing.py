"""The folder of made tasks: a dataset in BEIR layout that says how it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness1.config import Config
from harness1.data.formats import beir
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.retrieval.open import open_retriever
from harness1.runs.files import refuse_full_disk
from harness1.runs.stage import Stage, read_stage, refuse_other, under_way
from harness1.tasks.make import make_tasks

VERB = "tasks make"
FORMAT = 1
"""Counts changes in the tasks that are made of a corpus."""


def write_tasks(
    source: Source,
    index: str,
    out: Path,
    config: Config,
    *,
    count: int,
    seed: int,
    force: bool = False,
    on_task: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Make tasks over a corpus and write them, with the corpus, as a BEIR folder, if that is not done yet.

    Args:
        index: what `open_retriever` opens: an index of the corpus.
        on_task: called with the number of tasks that hold so far, and the number looked for.

    Returns:
        The numbers of documents and tasks, of tasks in each split and of each kind, and of tasks whose gold one search
        finds.

    Raises:
        UsageError: the folder holds something else or cannot be written, or the documents are on the web.
        CorpusError: the corpus cannot be read, or gives no task.
        InfrastructureFault: the index does not answer.
    """
    if not source.has_documents:
        raise UsageError(f"{source.name} has its documents on the web: tasks are made from documents that are here")
    inputs = {"source": source.name, "corpus": source.fingerprint, "count": count, "seed": seed, "format": FORMAT}
    stage = Stage(VERB, inputs)
    done = read_stage(out) if out.is_dir() else None
    if done is not None and stage.is_done(out) and not force:
        return done.outputs
    if not force:
        refuse_other(stage, out, "set of tasks")
    documents = list(source.documents())
    refuse_full_disk(out, 2 * sum(len(document.text) for document in documents))
    tasks = make_tasks(documents, open_retriever(index, config), count, seed, on_task)
    outputs = {
        "documents": len(documents),
        "tasks": len(tasks),
        "splits": dict(sorted(Counter(task.split for task in tasks).items())),
        "kinds": dict(Counter(task.metadata["kind"] for task in tasks).most_common()),
        "one_search": sum(task.metadata["reach"] == 1 for task in tasks),
        "left_out": len(source.problems),
    }
    with under_way(stage, out):
        beir.write(out, documents, tasks)
        stage.write(out, status="finished", outputs=outputs)
    return outputs
