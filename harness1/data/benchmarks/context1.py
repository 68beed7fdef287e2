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
from harness1.data.benchmarks.benchmark import Benchmark, Hub, Located, source_of
from harness1.data.benchmarks.corpora import corpus_of, document_of
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault
from harness1.data.formats.jsonl import identifier
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import ChunkId, DocId, Gold, Task

RELEASE = "pat-jj/harness-1-train-data"
SPLITS = ("test", "train")
VERIFIED = (
    "columns and ids against public code that reads released files; fixtures written by that. Not tried on"
    " an original file"
)
ReadGold = Callable[[str, Row], Gold]


def files_of(name: str) -> tuple[str, ...]:
    """Say what a folder of a benchmark must hold."""
    return (
        f"test.parquet, train.parquet (or .jsonl; also below queries/{name}/): query_id, query, document_ids, answer",
        f"corpora/{name}/test/*.parquet or corpora/{name}/train/*.parquet, or corpus.parquet: chunk_id, document_text",
        "data/train-*.parquet, as the hub has it: training questions",
    )


def hub_of(name: str, questions: str) -> tuple[Hub, ...]:
    """Return the place of a benchmark on the hub: its test questions, and the corpora with the training questions."""
    corpora = Hub(RELEASE, (f"corpora/{name}/**", "data/*.parquet"))
    return Hub(questions, ("data/test-*.parquet", "test*.parquet"), f"queries/{name}"), corpora


def open_context1(name: str, shared: bool, read_gold: ReadGold, root: Path, fault: Fault) -> Source:
    """Open a benchmark in this layout.

    Args:
        shared: whether training and test questions are over one corpus. Where they are not, ids of documents count from
            0 in each, and only the split of the corpus that is there can be asked: the test split, if both are.
        read_gold: what a row of questions should find.
    """
    corpus, split = _corpus(name, root)
    found = {each: _questions(name, root, each) for each in SPLITS if shared or split in (None, each)}
    splits = {each: partial(_tasks, name, files, each, read_gold, fault) for each, files in found.items() if files}
    if not splits:
        raise CorpusError(f"{root} has no questions of {name}: expected {split or 'test'}.parquet")
    return source_of(name, root, corpus_of(corpus, fault), splits, fault)


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
    return tables.require_files(
        root,
        "corpus",
        "corpus.parquet",
        "corpus/**/*.parquet",
        "corpus.jsonl",
        "corpus.jsonl.gz",
        f"corpora/{name}/**/*.parquet",
    ), None


def _questions(name: str, root: Path, split: str) -> tuple[Path, ...]:
    places = ("", "queries/", f"queries/{name}/")
    files = [f"{place}{split}.{suffix}" for place in places for suffix in ("parquet", "jsonl", "json")]
    return tables.find_files(root, *files, f"queries/{name}/**/{split}*.parquet", f"data/{split}-*.parquet")


def _tasks(name: str, files: tuple[Path, ...], split: str, read_gold: ReadGold, fault: Fault) -> Located:
    for where, row in tables.rows(files, fault):
        if row.get("dataset_name", name) != name or row.get("stage", "rl") != "rl":
            continue  # the released training file holds other benchmarks, and a teacher's episodes
        try:
            task_id = identifier(where, row, ("query_id",))
            query, gold = tables.text_of(where, row, "query"), read_gold(where, row)
        except CorpusError as error:
            fault(error)
            continue
        yield where, Task(task_id=task_id, query=query, split=split, gold=gold)


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


PATENTS = Benchmark(
    name="patents",
    what="rejected claims of patent applications, to be matched with the prior art that the examiner cited",
    size="718 test questions; a corpus for each split",
    licence="not stated; patent texts of the USPTO are public domain",
    origin="kellyhongg/1_18_patents_test (questions) and pat-jj/harness-1-train-data (corpora) on the hub",
    files=files_of("patents"),
    verified=VERIFIED,
    open=partial(open_context1, "patents", False, document_gold),
    hub=hub_of("patents", "kellyhongg/1_18_patents_test"),
)

SEC = Benchmark(
    name="sec",
    what="multi-hop questions over SEC filings; each needs 3 to 7 facts, each stated by any one of some chunks",
    size="502 test questions (sec_test_new; other snapshots have 691 or 1,216), 3,453 for training; 2,115,106 chunks",
    licence="not stated; filings are public documents",
    origin="kellyhongg/sec_test_new (questions) and pat-jj/harness-1-train-data (corpus of both splits) on the hub",
    files=files_of("sec"),
    verified=VERIFIED,
    open=partial(open_context1, "sec", True, fact_gold),
    unit="chunk",
    hub=hub_of("sec", "kellyhongg/sec_test_new"),
)

WEB = Benchmark(
    name="web",
    what="synthetic multi-hop questions over kept web pages, with distractors; some pages hold the final answer",
    size="554 test questions; a corpus for each split",
    licence="not stated; the pages are third parties'",
    origin="kellyhongg/web_1_17_test (questions) and pat-jj/harness-1-train-data (corpora) on the hub",
    files=files_of("web"),
    verified=VERIFIED,
    open=partial(open_context1, "web", False, document_gold),
    hub=hub_of("web", "kellyhongg/web_1_17_test"),
)
