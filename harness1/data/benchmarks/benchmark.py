"""Builds sources from the tasks and corpora of benchmarks, with unique ids and gold that the corpus has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from harness1.data.benchmarks.corpora import Corpus
from harness1.data.benchmarks.tables import Row, Rows
from harness1.data.faults import AbsentGold, Fault, NoGold, distinct
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import Gold, Task
from harness1.retrieval.corpus import Document

Located = Iterator[tuple[str, Task]]
"""Tasks, each with its place in the files."""


def source_of(
    name: str,
    root: Path,
    corpus: Corpus | None,
    splits: Mapping[str, Callable[[], Located]],
    fault: Fault,
    problems: list[str] | None = None,
    secret_answers: bool = False,
) -> Source:
    """Return a source whose tasks have unique ids and gold that its corpus has.

    Args:
        corpus: None where the documents are elsewhere, such as on the web; gold is then taken as it is.
        splits: for each split, a pass over its tasks.
        fault: handles a task that repeats an id or whose gold is absent.
        problems: what a pass over the documents leaves out, one line each.
    """

    def documents() -> Iterator[Document]:
        if corpus is None:
            raise CorpusError(
                f"{name}:{root} holds questions and no documents: they are on the web. Evaluate it with --index"
                " web:CACHE_FOLDER or another index, or put the pages into corpus.jsonl beside the questions"
            )
        empty = True
        for document in corpus.documents():
            empty = False
            yield document
        if empty:
            raise CorpusError(f"{name}:{root} holds no documents")

    def tasks(split: str) -> list[Task]:
        return _checked(list(distinct(splits[split](), lambda task: task.task_id, fault)), corpus, fault)

    return Source(
        *(name, name, documents, tuple(splits), tasks, [] if problems is None else problems, root.resolve()),
        edition=name,
        label=f"{name}:{root}",
        has_documents=corpus is not None,
        secret_answers=secret_answers,
    )


def tasks_of(rows: Rows, fault: Fault, task: Callable[[str, Row, int], Task | None]) -> Located:
    """Yield the task of each row, made of its place, the row and its number from 0.

    Args:
        fault: handles a row that `task` refuses.
        task: returns None for a row that belongs elsewhere.
    """
    for number, (where, row) in enumerate(rows):
        try:
            if found := task(where, row, number):
                yield where, found
        except CorpusError as error:
            fault(error)


def _checked(located: list[tuple[str, Task]], corpus: Corpus | None, fault: Fault) -> list[Task]:
    """Return the tasks that have gold, all of which is in the corpus."""
    absent = {name for _, task in located for name in gold_ids(task.gold)} if corpus else set()
    for name in corpus.ids() if corpus and absent else ():
        absent.discard(name)
        if not absent:
            break
    tasks = []
    for where, task in located:
        if task.gold is None or not task.gold.relevant:
            fault(NoGold(f"{where}: query {task.task_id!r} names nothing to find"))
        elif missing := absent_gold(task.gold, absent):
            fault(AbsentGold(f"{where}: query {task.task_id!r} should find {missing}, which the corpus does not have"))
        else:
            tasks.append(_without(task, absent))
    return tasks


def gold_ids(gold: Gold | None) -> set[str]:
    """Return the ids of all documents and chunks that a gold names."""
    if gold is None:
        return set()
    return {*gold.relevant, *gold.answer_docs, *(chunk for fact in gold.facts or () for chunk in fact)}


def absent_gold(gold: Gold, absent: set[str]) -> str | None:
    """Describe the gold that cannot be found if some ids are absent. A fact is present if one of its chunks is; where
    facts are scored, documents follow from them."""
    if gold.facts is None:
        return next((repr(name) for name in (*gold.relevant, *gold.answer_docs) if name in absent), None)
    gone = (fact for fact in gold.facts if all(chunk in absent for chunk in fact))
    return next((f"one of {list(fact)}" for fact in gone), None)


def _without(task: Task, absent: set[str]) -> Task:
    """Return a task whose facts can be found, without its absent documents."""
    gold = task.gold
    if gold is None or gold.facts is None or absent.isdisjoint(gold.relevant):
        return task
    relevant = {doc_id: grade for doc_id, grade in gold.relevant.items() if doc_id not in absent}
    answer_docs = tuple(doc_id for doc_id in gold.answer_docs if doc_id not in absent)
    kept = msgspec.structs.replace(gold, relevant=relevant, answer_docs=answer_docs)
    return msgspec.structs.replace(task, gold=kept)
