"""A TREC folder as a dataset: a corpus, topics and relevance files.

corpus.jsonl, docs.trec, ...     documents: JSON Lines, or `<DOC>` blocks in any number of .trec files
topics.tsv or queries.tsv        number, tab, question; or topics.trec and topics.txt, `<top>` blocks
qrels.txt, qrels.SPLIT.txt       `query 0 document grade`; without a name the split is `test`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path

from harness1.data.faults import DuplicateId, Fault, distinct, refuse
from harness1.data.formats import jsonl, trec, trec_text
from harness1.data.formats.trec_text import Topic
from harness1.errors import CorpusError
from harness1.records import Gold, Task
from harness1.retrieval.corpus import Document

TOPICS = ("topics.tsv", "queries.tsv", "topics.trec", "topics.txt", "topics")
_QRELS = re.compile(r"qrels?(?:[._-](?P<split>[\w-]+?))??(?:\.(?:txt|tsv|qrels|trec))?(?:\.gz)?", re.ASCII)


def is_trec(path: Path) -> bool:
    """Return whether a folder holds topics, relevance files and documents, and no queries in the format of BEIR."""
    if not path.is_dir() or jsonl.find_file(path, "queries.jsonl"):
        return False
    return _topics(path) is not None and bool(_qrels(path)) and bool(_documents(path))


def splits(folder: Path) -> tuple[str, ...]:
    """Return the names of the splits that have a relevance file, sorted."""
    return tuple(sorted(_qrels(folder)))


def read_corpus(folder: Path, fault: Fault = refuse) -> Iterator[Document]:
    """Yield the documents of all files.

    Raises:
        CorpusError: a document is broken or repeats an id, unless `fault` lets it pass.
    """
    seen: set[str] = set()
    files = _documents(folder)
    for path in files:
        read = jsonl.read if path.name.removesuffix(".gz").endswith(".jsonl") else trec_text.read_documents
        for document in read(path, fault):
            if len(files) > 1 and document.doc_id in seen:
                fault(DuplicateId(f"{path}: the id {document.doc_id!r} is also in another file"))
                continue
            if len(files) > 1:
                seen.add(document.doc_id)
            yield document


def read_tasks(folder: Path, split: str, fault: Fault = refuse) -> list[Task]:
    """Return the topics that have a relevant document, in the order of their file.

    Raises:
        CorpusError: topics or relevance file are broken, or a judged query is not a topic, unless `fault` lets it pass.
    """
    topics = distinct(_questions(folder, fault), itemgetter(0), fault)
    questions = {number: text for _, (number, text) in topics}
    relevant = trec.read_qrels(_qrels(folder)[split], questions, "topics", fault)
    return [
        Task(task_id=number, query=text, split=split, gold=Gold(relevant=relevant[number]))
        for number, text in questions.items()
        if number in relevant
    ]


def _questions(folder: Path, fault: Fault) -> Iterator[Topic]:
    path = _topics(folder)
    if path is None:
        raise CorpusError(f"{folder} has no topics: {', '.join(TOPICS)}")
    lines = jsonl.numbered_lines(path)
    first = next((line for _, line in lines if line.strip()), b"")
    if first.strip().lower() == b"<top>":
        return trec_text.read_topics(path, fault)
    return _tabbed(path, fault)


def _tabbed(path: Path, fault: Fault) -> Iterator[Topic]:
    for number, line in jsonl.numbered_lines(path, fault):
        if not line.strip():
            continue
        fields = line.decode("utf-8", "replace").rstrip("\r\n").split("\t")
        if len(fields) == 2 and all(field.strip() for field in fields):
            yield f"{path}:{number}", (fields[0].strip(), fields[1])
        else:
            fault(CorpusError(f"{path}:{number}: not `number, question` separated by a tab"))


def _topics(folder: Path) -> Path | None:
    return next((path for name in TOPICS if (path := jsonl.find_file(folder, name))), None)


def _qrels(folder: Path) -> dict[str, Path]:
    named = ((_QRELS.fullmatch(path.name), path) for path in sorted(folder.iterdir()) if path.is_file())
    return {found["split"] or "test": path for found, path in named if found}


def _documents(folder: Path) -> tuple[Path, ...]:
    corpus = jsonl.find_file(folder, "corpus.jsonl")
    if corpus:
        return (corpus,)
    topics = _topics(folder)
    found = chain(folder.glob("*.trec"), folder.glob("*.trec.gz"), folder.glob("corpus/*.trec*"))
    return tuple(
        sorted(path for path in found if path.is_file() and path != topics and not _QRELS.fullmatch(path.name))
    )
