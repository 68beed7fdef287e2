"""The folder of made tasks: a dataset in BEIR layout that says how it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config
from harness1.data.formats import beir
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import Task
from harness1.retrieval.open import open_retriever
from harness1.runs.files import refuse_full_disk
from harness1.runs.stage import Stage, read_stage, refuse_other, under_way
from harness1.tasks.make import make_tasks
from harness1.tasks.rewriting import REPLIES, Writer

VERB = "tasks make"
TEMPLATE = "template"
FORMAT = 7
"""Counts changes in the tasks that are made of a corpus."""


def write_tasks(
    source: Source,
    index: str,
    out: Path,
    config: Config,
    *,
    count: int,
    seed: int,
    writer: Writer | None = None,
    force: bool = False,
    on_reply: Callable[[int, int, int], None] = lambda done, of, tokens: None,
    on_task: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Make tasks over a corpus and write them, with the corpus, as a BEIR folder, if that is not done yet.

    Args:
        index: what `open_retriever` opens: an index of the corpus.
        writer: a model that writes the questions anew; None leaves those of the templates.
        on_reply: as in `Writer.rewrite`.
        on_task: called with the number of tasks that hold so far, and the number looked for.

    Returns:
        The numbers of documents and tasks, of tasks in each split and of each kind, and of tasks whose gold one search
        finds; and what a writer wrote and cost.

    Raises:
        UsageError: the folder holds something else or cannot be written, the documents are on the web, or the writer
            would refuse every request.
        CorpusError: the corpus cannot be read, or gives no task.
        InfrastructureFault: the index or the writer does not answer; the same call goes on.
    """
    if not source.has_documents:
        raise UsageError(f"{source.name} has its documents on the web: tasks are made from documents that are here")
    inputs = {"source": source.name, "corpus": source.fingerprint, "count": count, "seed": seed, "format": FORMAT}
    inputs["writer"] = TEMPLATE if writer is None else writer.name
    stage = Stage(VERB, inputs)
    done = read_stage(out) if out.is_dir() else None
    if done is not None and stage.is_done(out) and not force:
        return done.outputs
    if not force:
        refuse_other(stage, out, "set of tasks")
    documents = list(source.documents())
    refuse_full_disk(out, 2 * sum(len(document.text) for document in documents))
    tasks = make_tasks(documents, open_retriever(index, config), count, seed, on_task)
    outputs = {"documents": len(documents), **counts_of(tasks), "left_out": len(source.problems)}
    if force:
        (out / REPLIES).unlink(missing_ok=True)
    with under_way(stage, out):
        if writer is not None:
            titles = {document.doc_id: document.title for document in documents}
            tasks, written = writer.rewrite(tasks, titles, out, on_reply)
            outputs["writer"] = msgspec.to_builtins(written)
        beir.write(out, documents, tasks)
        stage.write(out, status="finished", outputs=outputs)
    return outputs


def counts_of(tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the numbers of tasks, of those in each split and of each kind, and of those that one search finds."""
    return {
        "tasks": len(tasks),
        "splits": dict(sorted(Counter(task.split for task in tasks).items())),
        "kinds": dict(Counter(task.metadata["kind"] for task in tasks).most_common()),
        "one_search": sum(task.metadata["reach"] == 1 for task in tasks),
    }
