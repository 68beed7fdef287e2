"""Corpora of benchmarks, and sources over them with unique ids and gold that the corpus has. A row with a `chunk_id` is
a chunk; its document's id is the chunk's without the number after its last underscore (`0000320193-24-000081_17`).
Other rows are documents: an id, and a text, a `title`, or both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import msgspec
from msgspec.structs import replace

from harness1.data import tables
from harness1.data.source import AbsentGold, EmptyText, Fault, NoGold, Source, drop_repeated, make_each, refuse
from harness1.data.tables import TEXT_KEYS, Row, Rows, distinct_documents, document_of_row, identifier
from harness1.data.walk import Walk
from harness1.errors import CorpusError, MissingExtra
from harness1.plain import text_digest
from harness1.records import ChunkId, DocId, Gold, Task
from harness1.retrieval.corpus import Document, GivenChunk

DOCUMENT_KEYS = ("docid", "_id", "id", "doc_id", "url")
CHUNK_KEYS = ("chunk_id",)
CHUNK_TEXT_KEYS = ("document_text", "text")
BETWEEN = "\n"  # joins the chunks of a document
Placed = tuple[str, Document]
"""A document at one of its places, which comes first."""
_NUMBER = re.compile(r"_(\d{1,18})$", re.ASCII)


@dataclass(frozen=True)
class Corpus:
    """Documents, and the ids of documents and chunks that gold may name."""

    documents: Callable[[], Iterator[Document]]  # starts a new, lazy pass over all documents
    ids: Callable[[], Iterable[str]]  # starts a new pass over all ids, some of which may repeat


def open_corpus(files: Sequence[Path], fault: Fault, spelling: Callable[[str], DocId] = DocId) -> Corpus:
    """Open the corpus in some files. `fault`: handles a row that is neither a document nor a chunk, or repeats an id.
    `spelling`: normalises the ids of whole documents, if the files may write one id in several ways."""

    def document(where: str, row: Row) -> Document:
        found = document_of_row(where, row, DOCUMENT_KEYS, lenient=True)
        return replace(found, doc_id=spelling(found.doc_id))

    def documents() -> Iterator[Document]:
        _, first = next(tables.rows(files, fault), ("", Row()))
        if "chunk_id" in first:
            return _join_chunks(files, fault)
        return distinct_documents(tables.rows(files, fault, (*DOCUMENT_KEYS, *TEXT_KEYS, "title")), document, fault)

    def ids() -> Iterator[str]:
        for _, row in tables.rows(files, _pass_over, (*CHUNK_KEYS, *DOCUMENT_KEYS)):
            if "chunk_id" in row:
                yield (chunk_id := str(row["chunk_id"]))
                yield document_of(chunk_id)
            else:
                yield from (spelling(str(row[key])) for key in DOCUMENT_KEYS if row.get(key) is not None)

    return Corpus(documents, ids)


def pool_documents(read: Callable[[], Iterator[Placed]], problems: list[str]) -> Corpus:
    """Open documents that occur at several places; the first counts, and differing ones are noted in `problems`."""

    def documents() -> Iterator[Document]:
        problems.clear()
        contents: dict[DocId, str] = {}
        for where, document in read():
            digest = text_digest(f"{document.title}\n{document.text}")
            if document.doc_id not in contents:
                contents[document.doc_id] = digest
                yield document
            elif contents[document.doc_id] != digest:
                problems.append(f"{where}: another text of {document.doc_id}")

    return Corpus(documents, lambda: (document.doc_id for document in documents()))


def document_of(chunk_id: str) -> DocId:
    """Return the document of a chunk."""
    return DocId(_NUMBER.sub("", chunk_id))


def _join_chunks(files: Sequence[Path], fault: Fault) -> Iterator[Document]:
    """Yield the documents of chunks in any order: one is complete after its last chunk, so that memory holds few."""
    named = make_each(tables.rows(files, _pass_over, CHUNK_KEYS), _chunk_id, _pass_over)
    left = Counter(document_of(chunk_id) for _, chunk_id in named)
    incomplete: dict[DocId, list[tuple[str, tuple[int, ChunkId, str]]]] = {}
    """For each document, the places of its chunks, and their numbers, ids and texts."""
    rows = tables.rows(files, fault, (*CHUNK_KEYS, *CHUNK_TEXT_KEYS))
    for where, (chunk_id, row) in make_each(rows, lambda where, row: (_chunk_id(where, row), row), fault):
        doc_id = document_of(chunk_id)
        pieces = incomplete.setdefault(doc_id, [])
        left[doc_id] -= 1
        text = next((row[key] for key in CHUNK_TEXT_KEYS if row.get(key) is not None), None)
        number = _NUMBER.search(chunk_id)
        if not isinstance(text, str):
            fault(CorpusError(f"{where}: chunk {chunk_id!r} needs a text ({', '.join(CHUNK_TEXT_KEYS)})"))
        elif not text.strip():
            fault(EmptyText(f"{where}: chunk {chunk_id!r} has no text"))
        else:
            pieces.append((where, (int(number[1]) if number else 0, chunk_id, text)))
        if left[doc_id]:
            continue
        parts = drop_repeated(incomplete.pop(doc_id), lambda piece: piece[1], fault)
        ordered, chunks, start = sorted(piece for _, piece in parts), list[GivenChunk](), 0
        for _, chunk_id, text in ordered:
            chunks.append(GivenChunk(chunk_id, start, start + len(text)))
            start += len(text) + len(BETWEEN)
        if chunks:
            yield Document(doc_id, "", BETWEEN.join(text for _, _, text in ordered), tuple(chunks))


def _chunk_id(where: str, row: Row) -> ChunkId:
    return ChunkId(identifier(where, row, CHUNK_KEYS))


def _pass_over(error: CorpusError) -> None:
    """Ignore what reading the documents already reports."""


Located = Iterator[tuple[str, Task]]  # tasks, each with its place in the files


def source_of(
    name: str,
    root: Path,
    corpus: Corpus | None,
    splits: Mapping[str, Callable[[], Located]],
    fault: Fault,
    problems: list[str] | None = None,
    secret_answers: bool = False,
) -> Source:
    """Return a source whose tasks have unique ids and gold that its corpus has; others go to `fault`. `corpus`: None
    where the documents are on the web. `problems`: what a pass over the documents leaves out."""

    def refuse_documents() -> Iterator[Document]:
        raise CorpusError(
            f"{name}:{root} holds questions and no documents: they are on the web. Evaluate it with --index"
            " web:CACHE_FOLDER or another index, or put the pages into corpus.jsonl beside the questions"
        )

    def tasks(split: str) -> list[Task]:
        return check_gold(list(drop_repeated(splits[split](), lambda task: task.task_id, fault)), corpus, fault)

    documents = corpus.documents if corpus else refuse_documents
    return Source(
        *(name, name, documents, tuple(splits), tasks, [] if problems is None else problems, root.resolve()),
        edition=name,
        label=f"{name}:{root}",
        has_documents=corpus is not None,
        secret_answers=secret_answers,
    )


def tasks_of(rows: Rows, fault: Fault, task: Callable[[str, Row, int], Task | None]) -> Located:
    """Yield the task of each row, made of its place, the row and its number from 0; None: the row belongs elsewhere."""
    for number, (where, row) in enumerate(rows):
        try:
            if found := task(where, row, number):
                yield where, found
        except CorpusError as error:
            fault(error)


def check_gold(located: list[tuple[str, Task]], corpus: Corpus | None, fault: Fault) -> list[Task]:
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
            if task.gold.facts is not None and not absent.isdisjoint(task.gold.relevant):
                relevant = {doc_id: grade for doc_id, grade in task.gold.relevant.items() if doc_id not in absent}
                answer_docs = tuple(doc_id for doc_id in task.gold.answer_docs if doc_id not in absent)
                task = replace(task, gold=replace(task.gold, relevant=relevant, answer_docs=answer_docs))
            tasks.append(task)
    return tasks


def gold_ids(gold: Gold | None) -> set[str]:
    """Return the ids of all documents and chunks that a gold names."""
    if gold is None:
        return set()
    return {*gold.relevant, *gold.answer_docs, *(chunk for fact in gold.facts or () for chunk in fact)}


def absent_gold(gold: Gold, absent: set[str]) -> str | None:
    """Describe the gold that cannot be found if some ids are absent; a fact is there if one of its chunks is."""
    if gold.facts is None:
        return next((repr(name) for name in (*gold.relevant, *gold.answer_docs) if name in absent), None)
    gone = (fact for fact in gold.facts if all(chunk in absent for chunk in fact))
    return next((f"one of {list(fact)}" for fact in gone), None)


MOST_PARTS = 20  # parts of a dataset that are looked at
POSITIVE, NEGATIVE = "positive_passages", "negative_passages"


class _Passage(msgspec.Struct):
    docid: str | int
    title: str | None = None
    text: str | None = None


def find_questions(root: Path, *, follow_links: bool = False) -> tuple[dict[str, list[Path]], list[Path], list[Path]]:
    """Return the Parquet files of questions with passages by split, as the hub has them for training retrievers,
    those of further documents, and all other files; nothing if there are none, or pyarrow is not installed."""
    walk = Walk(root, lambda name, why: None, follow_links=follow_links)
    paths = [root / name for name in sorted(walk.files())] if root.is_dir() else [root]
    parts: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        if path.name.endswith(".parquet"):
            parts.setdefault((path.parent, re.split(r"[-.]", path.name)[0]), []).append(path)
    splits, further = dict[str, list[Path]](), list[Path]()
    with suppress(CorpusError, MissingExtra):
        for (_, name), found in islice(parts.items(), MOST_PARTS):
            _, row = next(tables.rows(found[:1], refuse, (POSITIVE,)), ("", Row()))
            (splits.setdefault(name, []) if POSITIVE in row else further).extend(found)
        read = {*further, *chain.from_iterable(splits.values())}
        return splits, further, [path for path in paths if path not in read]
    return {}, [], []


def open_questions(root: Path, splits: Mapping[str, Sequence[Path]], further: Sequence[Path], fault: Fault) -> Source:
    """Open such questions, whose passages are the corpus, with the documents of further files."""
    problems = list[str]()

    def documents() -> Iterator[Placed]:
        for where, row in tables.rows([*chain.from_iterable(splits.values())], fault, (POSITIVE, NEGATIVE)):
            for key in (POSITIVE, NEGATIVE):
                for each in tables.convert(f"{where}: {key}", row.get(key) or [], list[_Passage]):
                    title, text = each.title or "", each.text or ""
                    if (title + text).strip():
                        yield where, Document(DocId(str(each.docid)), title, text)
        for document in open_corpus(further, fault).documents() if further else ():
            yield str(root), document

    def task(split: str, where: str, row: Row, number: int) -> Task:
        passages = tables.convert(f"{where}: {POSITIVE}", row.get(POSITIVE) or [], list[_Passage])
        relevant = dict.fromkeys((DocId(str(each.docid)) for each in passages), 1)
        return Task(identifier(where, row, ("query_id",)), tables.text_of(where, row, "query"), split, Gold(relevant))

    def tasks(split: str) -> Located:
        return tasks_of(tables.rows(splits[split], fault), fault, partial(task, split))

    readers = {split: partial(tasks, split) for split in splits}
    return source_of("passages", root, pool_documents(documents, problems), readers, fault, problems)
