"""The layout of the benchmarks from Context-1's data generation (Web, Patents, SEC).

    test.parquet, train.parquet              questions: `query_id`, `query`, `document_ids`, `answer`, and for documents
                                             perhaps `gold_document_ids`; lists as such or written out as text
    corpora/NAME/SPLIT/*.parquet             chunks: `chunk_id`, `document_text`, `metadata_json`
    data/train-*.parquet                     training questions of all three, with `dataset_name`, `stage` and
                                             `document_ids_json`

`document_ids` are documents, or facts: `{"fact", "chunk_ids", "is_final_answer"}`, stated by any one of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import Located, source_of, tasks_of
from harness1.data.benchmarks.corpora import corpus_of, document_of
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault
from harness1.data.formats.jsonl import identifier
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import ChunkId, DocId, Gold, Task

SPLITS = ("test", "train")
ReadGold = Callable[[str, Row], Gold]


def open_context1(name: str, read_gold: ReadGold, root: Path, fault: Fault, *, shared: bool = False) -> Source:
    """Open a benchmark in this layout.

    Args:
        read_gold: returns what the question in a row should find.
        shared: whether training and test questions share a corpus. If not, document ids count from 0 in each, and only
            the split whose corpus is present has tasks: the test split, if both are.
    """
    corpus, split = _corpus(name, root)
    found = {each: _questions(name, root, each) for each in SPLITS if shared or split in (None, each)}
    splits = [each for each, files in found.items() if files]
    if not splits:
        raise CorpusError(f"{root} has no questions of {name}: expected {split or 'test'}.parquet")

    def tasks(split: str) -> Located:
        return tasks_of(tables.rows(found[split], fault), fault, partial(_task, name, split, read_gold))

    return source_of(name, root, corpus_of(corpus, fault), {each: partial(tasks, each) for each in splits}, fault)


def document_gold(where: str, row: Row) -> Gold:
    """Return the relevant documents, and those among them that hold the answer."""
    relevant = [_document_id(where, value) for value in tables.list_of(where, row, "document_ids", "document_ids_json")]
    final = tables.list_of(where, row, "gold_document_ids") if row.get("gold_document_ids") is not None else []
    answer_docs = tuple(dict.fromkeys(_document_id(where, value) for value in final))
    return Gold(relevant=dict.fromkeys((*relevant, *answer_docs), 1), answer_docs=answer_docs, answers=_answers(row))


def fact_gold(where: str, row: Row) -> Gold:
    """Return facts, each with the chunks that state it, and the documents of these chunks."""
    facts = tables.list_of(where, row, "document_ids", "document_ids_json")
    stated = tuple(_chunks(where, fact) for fact in facts)
    final = tuple(number for number, fact in enumerate(facts) if fact.get("is_final_answer"))
    documents = [dict.fromkeys(map(document_of, chunks)) for chunks in stated]
    return Gold(
        relevant=dict.fromkeys((doc_id for each in documents for doc_id in each), 1),
        answer_docs=tuple(dict.fromkeys(doc_id for number in final for doc_id in documents[number])),
        facts=stated,
        answer_facts=final,
        answers=_answers(row),
    )


def _corpus(name: str, root: Path) -> tuple[tuple[Path, ...], str | None]:
    """Return the files of the corpus, and the split that it belongs to, if any."""
    for split in SPLITS:
        if files := tables.find_files(root, f"corpora/{name}/{split}/**/*.parquet"):
            return files, split
    names = ("corpus.parquet", "corpus/**/*.parquet", "corpus.jsonl", "corpus.jsonl.gz", f"corpora/{name}/**/*.parquet")
    return tables.require_files(root, "corpus", *names), None


def _questions(name: str, root: Path, split: str) -> tuple[Path, ...]:
    places = ("", "queries/", f"queries/{name}/")
    files = [f"{place}{split}.{suffix}" for place in places for suffix in ("parquet", "jsonl", "json")]
    return tables.find_files(root, *files, f"queries/{name}/**/{split}*.parquet", f"data/{split}-*.parquet")


def _task(name: str, split: str, read_gold: ReadGold, where: str, row: Row, number: int) -> Task | None:
    if row.get("dataset_name", name) != name or row.get("stage", "rl") != "rl":
        return None  # the released training file holds other benchmarks, and a teacher's episodes
    task_id = identifier(where, row, ("query_id",))
    return Task(task_id, tables.text_of(where, row, "query"), split, read_gold(where, row))


def _document_id(where: str, value: Any) -> DocId:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise CorpusError(f"{where}: {value!r} in document_ids is not the id of a document")
    text = str(value)
    return DocId(urldefrag(text).url if "://" in text else text)


def _chunks(where: str, fact: Any) -> tuple[ChunkId, ...]:
    chunks = fact.get("chunk_ids") if isinstance(fact, dict) else None
    if not isinstance(chunks, list) or not chunks or not all(isinstance(chunk, str) and chunk for chunk in chunks):
        raise CorpusError(f"{where}: a fact in document_ids needs chunk_ids, a list of at least one")
    return tuple(map(ChunkId, dict.fromkeys(chunks)))


def _answers(row: Row) -> tuple[str, ...]:
    answer = row.get("answer")
    return (answer,) if isinstance(answer, str) and answer.strip() else ()
