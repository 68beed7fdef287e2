"""The BEIR layout: `corpus.jsonl`, `queries.jsonl`, `qrels/<split>.tsv`; the files may be gzipped. Further evidence is
in the `metadata` of a query: `answer` and `answer_aliases` (texts), `answer_docs` (document ids), `facts` (for each
fact, the chunk ids any one of which states it), `answer_facts` (positions in `facts`). Reading moves these into
`Gold`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness1.data import tables
from harness1.data.source import DuplicateId, Fault, refuse
from harness1.data.trec import relevant_of
from harness1.errors import CorpusError
from harness1.records import ChunkId, DocId, Gold, Task
from harness1.retrieval.corpus import Document

CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
QRELS_HEADER = "query-id\tcorpus-id\tscore"


class _GoldMetadata(msgspec.Struct, omit_defaults=True):
    """The part of a query's metadata that is gold."""

    answer: str | list[str] | None = None
    answer_aliases: tuple[str, ...] = ()
    answer_docs: tuple[DocId, ...] = ()
    facts: tuple[tuple[ChunkId, ...], ...] | None = None
    answer_facts: tuple[int, ...] = ()


def is_beir(path: Path) -> bool:
    """Return whether a folder holds a BEIR corpus file."""
    return tables.find_file(path, CORPUS) is not None


def splits(folder: Path) -> tuple[str, ...]:
    """Return the names of the splits that have relevance judgements, sorted."""
    files = [path.name.removesuffix(".gz") for path in folder.glob(f"{QRELS}/*.tsv*")]
    return tuple(sorted({name.removesuffix(".tsv") for name in files if name.endswith(".tsv")}))


def read_tasks(folder: Path, split: str, fault: Fault = refuse) -> list[Task]:
    """Return the tasks of a split that have a relevant document, in the order of the query file. Raises CorpusError:
    a file is missing; or, unless `fault` lets that pass, a line is broken or contradicts another."""
    if split not in splits(folder):
        raise CorpusError(f"{folder} has no split {split!r}; it has: {', '.join(splits(folder)) or 'none'}")
    relevant = relevant_of(_judgements(_existing(folder, f"{QRELS}/{split}.tsv"), fault), fault)
    tasks: dict[str, Task] = {}
    for where, row in tables.rows([_existing(folder, QUERIES)], fault):
        try:
            task_id = tables.identifier(where, row)
            if task_id in tasks:
                raise DuplicateId(f"{where}: the id {task_id!r} occurs a second time")
            if task_id in relevant:
                tasks[task_id] = _task(where, row, task_id, split, relevant[task_id])
        except CorpusError as error:
            fault(error)
    for task_id in relevant:
        if task_id not in tasks:
            fault(CorpusError(f"{folder}: {split} judges query {task_id!r}, which is not in {QUERIES}"))
    return list(tasks.values())


def _judgements(path: Path, fault: Fault) -> Iterator[tuple[str, str, str, str]]:
    for number, line in tables.numbered_lines(path, fault):
        fields = line.decode("utf-8", "replace").rstrip("\r\n").split("\t")
        if len(fields) == 3 and (number > 1 or fields[-1] != "score"):
            yield f"{path}:{number}", fields[0], fields[1], fields[2]
        elif len(fields) != 3 and fields != [""]:
            fault(CorpusError(f"{path}:{number}: not `query-id, corpus-id, score` between tabs"))


def write(folder: Path, documents: Iterable[Document], tasks: Iterable[Task]) -> None:
    """Write a corpus and then its tasks, plain, so that reading gives equal values. Raises CorpusError: the folder
    cannot be written, an id would break the table of judgements, or two splits ask different things under one id."""
    queries: dict[str, dict[str, Any]] = {}
    judged: dict[str, list[str]] = {}
    try:
        (folder / QRELS).mkdir(parents=True, exist_ok=True)
        with (folder / CORPUS).open("wb") as file:
            for each in documents:
                chunks = {tables.CHUNKS_KEY: each.chunks} if each.chunks else {}
                row = {"_id": each.doc_id, "title": each.title, "text": each.text, **chunks}
                file.write(msgspec.json.encode(row) + b"\n")
        for task in tasks:
            gold = task.gold or Gold(relevant={})
            answer = gold.answers[0] if gold.answers else None
            own = _GoldMetadata(answer, gold.answers[1:], gold.answer_docs, gold.facts, gold.answer_facts)
            metadata = task.metadata | msgspec.to_builtins(own)
            query = {"_id": task.task_id, "text": task.query, "metadata": metadata}
            if queries.setdefault(task.task_id, query) != query:
                raise CorpusError(f"{folder}: two queries have the id {task.task_id!r}")
            for name in (task.task_id, *gold.relevant) if gold.relevant else ():
                if any(mark in name for mark in "\t\r\n"):
                    raise CorpusError(f"the id {name!r} holds a tab or a line break, which no table can")
            lines = judged.setdefault(task.split, [QRELS_HEADER])
            lines += [f"{task.task_id}\t{doc_id}\t{grade}" for doc_id, grade in gold.relevant.items()]
        (folder / QUERIES).write_bytes(b"".join(msgspec.json.encode(query) + b"\n" for query in queries.values()))
        for split, lines in judged.items():
            (folder / QRELS / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    except OSError as error:
        raise CorpusError(f"cannot write {folder}: {error}") from error


def _existing(folder: Path, name: str) -> Path:
    path = tables.find_file(folder, name)
    if path is None:
        raise CorpusError(f"{folder} is not a whole BEIR folder: it has no {name} or {name}.gz")
    return path


def _task(where: str, row: dict[str, Any], task_id: str, split: str, relevant: dict[DocId, int]) -> Task:
    query, metadata = row.get("text"), row.get("metadata") or {}
    if not isinstance(query, str) or not query.strip():
        raise CorpusError(f"{where}: query {task_id!r} needs a text")
    evidence = tables.convert(f"{where}: metadata of query {task_id!r}", metadata, _GoldMetadata)
    answers = [evidence.answer] if isinstance(evidence.answer, str) else evidence.answer or []
    texts = (*answers, *evidence.answer_aliases)
    gold = Gold(relevant, evidence.answer_docs, evidence.facts, evidence.answer_facts, texts)
    others = {key: value for key, value in metadata.items() if key not in _GoldMetadata.__struct_fields__}
    return Task(task_id=task_id, query=query, split=split, gold=gold, metadata=others)
