"""Benchmarks: makes sources of their tasks and corpora, with unique ids and gold that the corpus has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.corpora import Corpus
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import AbsentGold, DuplicateId, Fault, NoGold
from harness1.data.source import Source
from harness1.errors import CorpusError, UsageError
from harness1.records import Gold, Task, Unit
from harness1.retrieval.corpus import Document

Located = Iterator[tuple[str, Task]]
"""Tasks, each with its place in the files."""


@dataclass(frozen=True)
class Hub:
    """Files of a dataset on the Hugging Face hub: patterns of names, and the folder that each goes to."""

    repository: str
    patterns: tuple[str, ...]
    folder: str = ""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. `files` says what a folder must hold; `verified` says on which data the reader was tried."""

    name: str
    what: str
    size: str
    licence: str
    origin: str
    files: tuple[str, ...]
    verified: str
    open: Callable[[Path, Fault], Source]
    unit: Unit = "document"
    """The unit that the paper scores, which `index.unit` must equal."""
    hub: tuple[Hub, ...] = ()
    by_hand: str = ""
    """Files that no hub has, and how to get them."""

    def row(self) -> dict[str, object]:
        """Return the facts that users see, as plain data."""
        shown = ("name", "what", "size", "licence", "origin", "files", "verified", "unit")
        return {name: getattr(self, name) for name in shown}


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
        fault: what is done about a task that repeats an id or whose gold is absent.
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
        if split not in splits:
            raise UsageError(f"{name}:{root} has no split {split!r}; it has: {', '.join(splits) or 'none'}")
        return _checked(_unique(splits[split](), fault), corpus, fault)

    return Source(
        *(name, name, documents, tuple(splits), tasks, [] if problems is None else problems, root.resolve()),
        edition=name,
        has_documents=corpus is not None,
        secret_answers=secret_answers,
    )


def tasks_of(files: Sequence[Path], fault: Fault, task: Callable[[str, Row, int], Task]) -> Located:
    """Yield the task of each row, made of its place, the row and its number; rows that make none go to `fault`."""
    for number, (where, row) in enumerate(tables.rows(files, fault)):
        try:
            yield where, task(where, row, number)
        except CorpusError as error:
            fault(error)


def _unique(located: Located, fault: Fault) -> list[tuple[str, Task]]:
    kept: dict[str, tuple[str, Task]] = {}
    for where, task in located:
        if task.task_id in kept:
            fault(DuplicateId(f"{where}: the id {task.task_id!r} occurs a second time"))
        else:
            kept[task.task_id] = (where, task)
    return list(kept.values())


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
    """Return every document and chunk that some gold names."""
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
