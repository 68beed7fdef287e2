"""LongSealQA: SealQA's questions with the pages that help and many that distract, pooled over all questions.

A row has `golds`, the pages that hold the answer, and `12_docs`, `20_docs` and `30_docs`, distractors; a page is
`{"title", "text", "url", "date"}`. The corpus is every page of `golds` and of the largest set, by its address.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import source_of, tasks_of
from harness1.data.benchmarks.corpora import Placed, pooled
from harness1.data.benchmarks.sealqa import page_id, task_of
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault, made
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import DocId, Task
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.page_cache import page_url

NAME = "longseal"
SETS = ("30_docs", "20_docs", "12_docs")
PAGE = ("url", "title", "text")


def open_longseal(root: Path, fault: Fault) -> Source:
    """Open the questions of a file over the pages of all of them."""
    patterns = ("longseal.parquet", "longseal*.parquet", "longseal/test-*.parquet", "longseal.jsonl", "longseal.json")
    files = tables.require_files(root, "questions", *patterns)
    problems: list[str] = []
    corpus = pooled(lambda: _documents(files, fault, problems), problems)
    splits = {"test": lambda: tasks_of(tables.rows(files, fault), fault, _task)}
    return source_of(NAME, root, corpus, splits, fault, problems)


def _documents(files: tuple[Path, ...], fault: Fault, problems: list[str]) -> Iterator[Placed]:
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


def _task(where: str, row: Row, number: int) -> Task:
    pages = [page for page in tables.list_of(where, row, "golds") if isinstance(page, dict)]
    addresses = [page.get("url") for page in pages] or tables.list_of(where, row, "urls")
    return task_of(where, row, number, [page_id(where, address) for address in addresses])
