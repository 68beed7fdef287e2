"""Titles of gold documents, so that one that no search found can be named."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from harness1.errors import UsageError
from harness1.eval.run import Run
from harness1.records import Gold, Unit
from harness1.retrieval.corpus import Document
from harness1.reward.measures import targets

MOST_READ = 200_000
"""Documents of each dataset that are read for their titles; those of gold further on stay without one."""
MOST = 20_000
"""Limit of titles."""
LONGEST = 200
"""Characters of a title."""


def gold_titles(run: Run) -> dict[str, str]:
    """Return the titles of the gold units of a run by id, as far as the first documents of its datasets tell; none if
    these cannot be read."""
    wanted = {name for (task_id, _), each in run.golds.items() for name in _units(task_id, each, run.config.index.unit)}
    titles: dict[str, str] = {}
    try:
        for document in _documents(run) if wanted else ():
            titles |= {name: document.title[:LONGEST] for name in _names(document, wanted) if document.title}
            if len(titles) >= min(len(wanted), MOST):
                break
    except (UsageError, OSError):
        return titles
    return titles


def _documents(run: Run) -> Iterator[Document]:
    for source in run.sources:
        if source.has_documents:
            yield from islice(source.documents(), MOST_READ)


def _units(task_id: str, gold: Gold, unit: Unit) -> Iterator[str]:
    try:
        for target in targets(task_id, gold, unit).relevant:
            yield from target
    except UsageError:
        return


def _names(document: Document, wanted: set[str]) -> Iterator[str]:
    """Yield the wanted ids of a document: its own, and those of its chunks."""
    if document.doc_id in wanted:
        yield document.doc_id
    yield from (each.chunk_id for each in document.chunks if each.chunk_id in wanted)
