"""SealQA (Pham et al. 2025): Seal-0, which is asked on the web, and LongSeal, whose pages are pooled.

Rows of both have `question`, `answer`, `urls` and labels. One of LongSeal also has `golds`, the pages that hold the
answer, and `12_docs`, `20_docs` and `30_docs`, distractors; a page is `{"title", "text", "url", "date"}`. Its corpus is
every page of `golds` and of the largest set, by its address.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import source_of, tasks_of
from harness1.data.benchmarks.corpora import Corpus, Placed, corpus_of, pooled
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault, made
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.page_cache import page_url

PAGES = ("corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet")
"""Pages that a user has saved: the address as id, a title and a text."""
SETS = ("30_docs", "20_docs", "12_docs")
PAGE = ("url", "title", "text")
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


def _task(where: str, row: Row, number: int, relevant: list[DocId]) -> Task:
    """Return a question. Rows have no id, so their number from 0 serves, as in the published evaluation."""
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


def open_seal0(root: Path, fault: Fault) -> Source:
    """Open the questions of a file, whose relevant documents are addresses of pages."""
    patterns = ("seal-0.parquet", "seal_0*.parquet", "seal_0/test-*.parquet", "seal-0.jsonl", "seal-0.json")
    files = tables.require_files(root, "questions", *patterns)
    splits = {"test": lambda: tasks_of(tables.rows(files, fault), fault, _seal0_task)}
    return source_of("seal0", root, kept_pages(root, fault), splits, fault)


def _seal0_task(where: str, row: Row, number: int) -> Task:
    return _task(where, row, number, [page_id(where, address) for address in tables.list_of(where, row, "urls")])


def open_longseal(root: Path, fault: Fault) -> Source:
    """Open the questions of a file over the pages of all of them."""
    patterns = ("longseal.parquet", "longseal*.parquet", "longseal/test-*.parquet", "longseal.jsonl", "longseal.json")
    files = tables.require_files(root, "questions", *patterns)
    problems: list[str] = []
    corpus = pooled(lambda: _pooled_pages(files, fault, problems), problems)
    splits = {"test": lambda: tasks_of(tables.rows(files, fault), fault, _longseal_task)}
    return source_of("longseal", root, corpus, splits, fault, problems)


def _pooled_pages(files: tuple[Path, ...], fault: Fault, problems: list[str]) -> Iterator[Placed]:
    for where, pages in made(tables.rows(files, fault), _pages, fault):
        for page in pages:
            url, title, text = page_url(page["url"] or ""), page["title"] or "", page["text"] or ""
            if url is None or not (title + text).strip():
                problems.append(f"{where}: a page without {'text' if url else 'an address'}")
            else:
                yield Document(DocId(url), title, text), f"{title}\n{text}", f"{where}: another text of {url}"


def _pages(where: str, row: Row) -> list[dict[str, str | None]]:
    """Return the pages of a question: those that help, then the distractors."""
    distracting = next((name for name in SETS if row.get(name) is not None), SETS[0])
    pages = [page for name in ("golds", distracting) for page in tables.list_of(where, row, name)]
    for page in pages:
        if not isinstance(page, dict) or not all(isinstance(page.get(key), str | None) for key in PAGE):
            raise CorpusError(f"{where}: a page is texts under {', '.join(PAGE)}, not {page!r:.60}")
    return [{key: page.get(key) for key in PAGE} for page in pages]


def _longseal_task(where: str, row: Row, number: int) -> Task:
    pages = [page for page in tables.list_of(where, row, "golds") if isinstance(page, dict)]
    addresses = [page.get("url") for page in pages] or tables.list_of(where, row, "urls")
    return _task(where, row, number, [page_id(where, address) for address in addresses])
