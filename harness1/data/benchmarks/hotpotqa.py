"""HotpotQA (Yang et al. 2018): questions over two paragraphs of Wikipedia.

A question is `{"_id", "question", "answer", "type", "level", "supporting_facts": [[title, sentence]], "context":
[[title, [sentence]]]}`; on the hub `id` stands for `_id`, and the pairs are lists under `title`, `sent_id` and
`sentences`. The paragraphs of all contexts in the folder are the corpus: one document for each title.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import Located, source_of, tasks_of
from harness1.data.benchmarks.corpora import Placed, pooled
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import DuplicateId, Fault, made
from harness1.data.formats.jsonl import identifier
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document

NAME = "hotpotqa"
FILES = {
    "dev": (
        ("hotpot_dev_distractor_v*.json", "distractor/validation-*.parquet"),
        ("hotpot_dev_fullwiki_v*.json", "fullwiki/validation-*.parquet"),
    ),
    "train": (("hotpot_train_v*.json", "distractor/train-*.parquet"),),
}
"""The files of each split: the first of each group that exists. The two of `dev` differ only in their contexts."""


def open_hotpotqa(root: Path, fault: Fault) -> Source:
    """Open the questions of a folder, or of one file, over the paragraphs of their contexts."""
    files = _files(root)
    problems: list[str] = []
    corpus = pooled(lambda: _documents([*chain.from_iterable(files.values())], fault), problems)
    splits = {split: partial(_tasks, paths, split, fault) for split, paths in files.items()}
    return source_of(NAME, root, corpus, splits, fault, problems)


def document_id(title: str) -> DocId:
    """Return the id of an article: its title with underscores, as in Wikipedia's addresses."""
    return DocId("_".join(title.split()))


def _files(root: Path) -> dict[str, list[Path]]:
    if root.is_file():
        return {"train" if "train" in root.name else "dev": [root]}
    found = {
        split: [path for group in groups for path in tables.find_files(root, *group)] for split, groups in FILES.items()
    }
    if not any(found.values()):
        raise CorpusError(f"{root} has no questions of HotpotQA: expected hotpot_dev_distractor_v1.json or its like")
    return {split: paths for split, paths in found.items() if paths}


def _documents(files: list[Path], fault: Fault) -> Iterator[Placed]:
    for where, paragraphs in made(tables.rows(files, fault), _paragraphs, fault):
        for document in paragraphs:
            yield document, document.text, f"{where}: another text under the title {document.title!r}"


def _paragraphs(where: str, row: Row) -> list[Document]:
    return [_paragraph(where, *pair) for pair in _pairs(where, row, "context", "sentences")]


def _paragraph(where: str, title: Any, sentences: Any) -> Document:
    if not isinstance(title, str) or not title.strip():
        raise CorpusError(f"{where}: a paragraph without a title")
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise CorpusError(f"{where}: the paragraph {title!r} is not a list of sentences")
    return Document(doc_id=document_id(title), title=title, text="".join(sentences).strip())


def _tasks(files: list[Path], split: str, fault: Fault) -> Located:
    """Yield the questions of some files, without those that a further file repeats."""
    asked: dict[str, tuple[Path, str]] = {}
    for path in files:
        for where, task in tasks_of(tables.rows([path], fault), fault, partial(_task, split)):
            first, query = asked.setdefault(task.task_id, (path, task.query))
            if first == path:
                yield where, task
            elif query != task.query:
                fault(DuplicateId(f"{where}: {first.name} asks something else under the id {task.task_id!r}"))


def _task(split: str, where: str, row: Row, number: int) -> Task:
    titles = [title for title, _ in _pairs(where, row, "supporting_facts", "sent_id")]
    if not all(isinstance(title, str) for title in titles):
        raise CorpusError(f"{where}: a title in supporting_facts is not a text")
    return Task(
        task_id=identifier(where, row),
        query=tables.text_of(where, row, "question"),
        split=split,
        gold=Gold(relevant=dict.fromkeys(map(document_id, titles), 1), answers=(tables.text_of(where, row, "answer"),)),
        metadata={key: row[key] for key in ("type", "level") if key in row},
    )


def _pairs(where: str, row: Row, key: str, second: str) -> list[tuple[Any, Any]]:
    """Return the pairs of a field, written as lists of two or as two lists of equal length."""
    value = row.get(key)
    if isinstance(value, dict):
        titles, others = value.get("title"), value.get(second)
        if isinstance(titles, list) and isinstance(others, list) and len(titles) == len(others):
            return list(zip(titles, others, strict=True))
    elif isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return [(pair[0], pair[1]) for pair in value]
    raise CorpusError(f"{where}: {key} is not a list of pairs")
