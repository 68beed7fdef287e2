"""LongSealQA: SealQA's questions with the pages that help and many that distract, pooled over all questions.

A row has `golds`, the pages that hold the answer, and `12_docs`, `20_docs` and `30_docs`, distractors; a page is
`{"title", "text", "url", "date"}`. The corpus is every page of `golds` and of the largest set, by its address.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import Benchmark, Hub, source_of, tasks_of
from harness1.data.benchmarks.corpora import Corpus
from harness1.data.benchmarks.sealqa import LICENCE, REPOSITORY, page_id, task_of
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.hashing import text_digest
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

    def documents() -> Iterator[Document]:
        problems.clear()
        return _documents(files, fault, problems)

    corpus = Corpus(documents, lambda: (document.doc_id for document in documents()))
    return source_of(NAME, root, corpus, {"test": lambda: tasks_of(files, fault, _task)}, fault, problems)


def _documents(files: tuple[Path, ...], fault: Fault, problems: list[str]) -> Iterator[Document]:
    texts: dict[str, str] = {}
    for where, row in tables.rows(files, fault):
        try:
            pages = _pages(where, row)
        except CorpusError as error:
            fault(error)
            continue
        for page in pages:
            url, title, text = page_url(page["url"] or ""), page["title"] or "", page["text"] or ""
            if url is None or not (title + text).strip():
                problems.append(f"{where}: a page without {'text' if url else 'an address'}")
                continue
            content = text_digest(f"{title}\n{text}")
            if url not in texts:
                texts[url] = content
                yield Document(doc_id=DocId(url), title=title, text=text)
            elif texts[url] != content:
                problems.append(f"{where}: another text of {url}")


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


LONGSEAL = Benchmark(
    name=NAME,
    what="SealQA's questions with pages that help among many that distract, as one corpus",
    size="254 questions with up to 30 distracting pages each",
    licence=LICENCE,
    origin="vtllms/sealqa on the hub, configuration longseal",
    files=("longseal.parquet: question, answer, urls, golds, 12_docs, 20_docs, 30_docs",),
    verified="columns against public code that reads them and the file list of the hub; fixtures written by that. Not"
    " tried on an original file; the paper's own conversion is not published",
    open=open_longseal,
    hub=(Hub(REPOSITORY, ("longseal.parquet",)),),
)
