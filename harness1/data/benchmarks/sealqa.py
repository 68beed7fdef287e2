"""The rows of SealQA (Pham et al. 2025), which LongSeal and Seal-0 share: `question`, `answer`, `urls` and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import Benchmark, Hub, source_of, tasks_of
from harness1.data.benchmarks.corpora import Corpus, corpus_of
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import DocId, Gold, Task
from harness1.retrieval.engines.page_cache import page_url

REPOSITORY = "vtllms/sealqa"
LICENCE = "Apache-2.0 by its card, as far as is known; the pages are third parties'. Rows carry a canary: publish none"
PAGES = ("corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet")
"""Pages that a user has saved: the address as id, a title and a text."""
LABELS = ("topic", "freshness", "question_types", "effective_year", "search_results")


def page_id(where: str, address: Any) -> DocId:
    """Return a page's address in one spelling, that of the web retriever: without a fragment.

    Raises:
        CorpusError: it is not the address of a page.
    """
    url = page_url(address) if isinstance(address, str) else None
    if url is None:
        raise CorpusError(f"{where}: {address!r} is not the address of a page")
    return DocId(url)


def same_page(doc_id: str) -> DocId:
    """Return the id of a page in a corpus of pages: its address in the one spelling; other ids stay."""
    return DocId(page_url(doc_id) or doc_id)


def task_of(where: str, row: Row, number: int, relevant: list[DocId]) -> Task:
    """Return a question. Rows have no id, so their number from 0 serves, as in the published evaluation.

    Raises:
        CorpusError: it has no question or answer.
    """
    return Task(
        task_id=str(number),
        query=tables.text_of(where, row, "question"),
        split="test",
        gold=Gold(relevant=dict.fromkeys(relevant, 1), answers=(tables.text_of(where, row, "answer"),)),
        metadata={label: row[label] for label in LABELS if row.get(label) is not None},
    )


def kept_pages(root: Path, fault: Fault) -> Corpus | None:
    """Return the pages that a user has saved beside the questions, or None if they are on the web."""
    pages = tables.find_files(root, *PAGES) if root.is_dir() else ()
    return corpus_of(pages, fault, same_page) if pages else None


NAME = "seal0"


def open_seal0(root: Path, fault: Fault) -> Source:
    """Open the questions of a file, whose relevant documents are addresses of pages."""
    patterns = ("seal-0.parquet", "seal_0*.parquet", "seal_0/test-*.parquet", "seal-0.jsonl", "seal-0.json")
    files = tables.require_files(root, "questions", *patterns)
    return source_of(NAME, root, kept_pages(root, fault), {"test": lambda: tasks_of(files, fault, _task)}, fault)


def _task(where: str, row: Row, number: int) -> Task:
    return task_of(where, row, number, [page_id(where, address) for address in tables.list_of(where, row, "urls")])


SEAL0 = Benchmark(
    name=NAME,
    what="questions on which a search of the web gives conflicting or unhelpful pages; asked on the web or a cache",
    size="111 questions, no corpus",
    licence=LICENCE,
    origin="vtllms/sealqa on the hub, configuration seal_0",
    files=(
        "seal-0.parquet: question, answer, urls",
        "corpus.jsonl, if the pages are at hand: the address as _id, title, text",
    ),
    verified="columns against public code that reads them and the file list of the hub; fixtures written by that. Not"
    " tried on an original file",
    open=open_seal0,
    hub=(Hub(REPOSITORY, ("seal-0.parquet",)),),
)
