"""TREC's formats: runs, which are written, relevance files, documents and topics, and a folder of them as a dataset.
Documents and topics are `<DOC>` and `<top>` blocks, plain or gzipped. A document has a `<DOCNO>`, perhaps a title, and
text: the content of `<TEXT>`, or else all outside fields. A folder holds corpus.jsonl or .trec files, topics.trec or
topics.txt (`<top>` blocks) or topics.tsv or queries.tsv (number, tab, question), and qrels.txt or qrels.SPLIT.txt."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path

from harness1.data import tables
from harness1.data.source import DuplicateId, EmptyText, Fault, drop_repeated, make_each, refuse
from harness1.data.tables import LINE_BYTES, numbered_lines
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId, Gold, Task, UnitId
from harness1.retrieval.corpus import Document
from harness1.runs.files import write_atomically

HIGHEST_GRADE = 1000  # larger ones are no grades, and break sums of gains


def write_run(path: Path, run: Iterable[tuple[str, Sequence[tuple[UnitId, float]]]], tag: str) -> None:
    """Write rankings, best first, with scores in full. Raises UsageError: an id or the tag is empty or holds white
    space, or the file cannot be written."""
    ranked = ((task_id, rank, *unit) for task_id, units in run for rank, unit in enumerate(units, start=1))
    _write(path, ((task_id, "Q0", unit_id, rank, float(score), tag) for task_id, rank, unit_id, score in ranked))


def read_qrels(path: Path, known: Container[str], what: str, fault: Fault = refuse) -> dict[str, dict[DocId, int]]:
    """Return the documents with a grade above 0 of every task that has any. `known`: the tasks that may be judged,
    which `what` names in errors. Raises CorpusError: a line is broken, contradicts another, or judges an unknown
    task, unless `fault` lets it pass."""

    def judged() -> Iterator[tuple[str, str, str, str]]:
        for number, line in numbered_lines(path, fault):
            columns = line.decode("utf-8", "replace").split()
            if columns and len(columns) != 4:
                fault(CorpusError(f"{path}:{number}: {len(columns)} columns where 4 are expected"))
            elif columns and columns[0] not in known:
                fault(CorpusError(f"{path}:{number}: query {columns[0]!r} is not among the {what}"))
            elif columns:
                yield f"{path}:{number}", columns[0], columns[2], columns[3]

    return relevant_of(judged(), fault)


def relevant_of(judged: Iterable[tuple[str, str, str, str]], fault: Fault) -> dict[str, dict[DocId, int]]:
    """Return the relevant documents of tasks. `judged`: place, task, document and grade of each judgement."""
    grades: dict[tuple[str, str], int] = {}
    relevant: dict[str, dict[DocId, int]] = {}
    for where, task_id, doc_id, text in judged:
        found = re.fullmatch(r"\s*([+-]?\d{1,9})\s*", text, re.ASCII)
        grade = int(found[1]) if found else HIGHEST_GRADE + 1
        if abs(grade) > HIGHEST_GRADE:
            fault(CorpusError(f"{where}: the grade must be a whole number up to {HIGHEST_GRADE}, not {text!r}"))
        elif grades.setdefault((task_id, doc_id), grade) != grade:
            fault(DuplicateId(f"{where}: {doc_id!r} was given another grade for query {task_id!r} before"))
        elif grade > 0:
            relevant.setdefault(task_id, {})[DocId(doc_id)] = grade
    return relevant


def write_qrels(path: Path, relevant: Mapping[str, Mapping[DocId, int]]) -> None:
    """Write graded documents of tasks, in the order given; raises as `write_run`."""
    graded = ((task_id, *pair) for task_id, found in relevant.items() for pair in found.items())
    _write(path, ((task_id, 0, doc_id, grade) for task_id, doc_id, grade in graded))


def _write(path: Path, rows: Iterable[Sequence[object]]) -> None:
    lines = []
    for row in rows:
        for name in map(str, row):
            if name.split() != [name]:
                raise UsageError(f"{name!r} is empty or holds white space, which a TREC file cannot")
        lines.append(f"{' '.join(map(str, row))}\n")
    try:
        write_atomically(path, "".join(lines).encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


_OPENING, _CLOSING = re.compile(r"<(\w++)"), re.compile(r"</(\w++)\s*+>")
_TAG = re.compile(r"</?\w[^>]*>")
_TOPIC_FIELD = re.compile(r"<(num|title)>\s*(?:Number:|Topic:)?(.*?)(?=<|\Z)", re.DOTALL | re.IGNORECASE)
TITLES = ("title", "headline", "head", "ti")


def _blocks(path: Path, tag: str, fault: Fault) -> Iterator[tuple[str, str]]:
    opening, closing = f"<{tag}>".lower(), f"</{tag}>".lower()
    begun, size, lines = 0, 0, [""]
    for number, raw in numbered_lines(path, fault):
        line = raw.decode("utf-8", "replace")
        word = line.strip().lower()
        if word == opening:
            if begun:
                fault(CorpusError(f"{path}:{begun}: <{tag}> without {closing} before the next one"))
            begun, size, lines = number, 0, []
        elif word == closing and begun:
            if size <= LINE_BYTES:
                yield f"{path}:{begun}", "".join(lines)
            begun = 0
        elif begun:
            if size <= LINE_BYTES < size + len(raw):
                fault(CorpusError(f"{path}:{begun}: <{tag}> is longer than {LINE_BYTES:,} bytes"))
                lines.clear()
            size += len(raw)
            if size <= LINE_BYTES:
                lines.append(line)
        elif word:
            fault(CorpusError(f"{path}:{number}: text outside of <{tag}>"))
    if begun:
        fault(CorpusError(f"{path}:{begun}: <{tag}> without {closing}"))


def _document(where: str, block: str) -> Document:
    fields: dict[str, str] = {}
    outside, at = [], 0
    for name, start, inside, end, after in _fields(block):
        fields.setdefault(name, block[inside:end])
        outside.append(block[at:start])
        at = after
    doc_id = fields.get("docno", "").strip()
    if not doc_id:
        raise CorpusError(f"{where}: a document needs a <DOCNO>")
    title = next((_plain(fields[name]) for name in TITLES if name in fields), "")
    text = _plain(fields["text"] if "text" in fields else "".join((*outside, block[at:])))
    if not title and not text:
        raise EmptyText(f"{where}: document {doc_id!r} has neither title nor text")
    return Document(doc_id=DocId(doc_id), title=" ".join(title.split()), text=text)


def _fields(block: str) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the name of each closed field, and where its tags begin and end. One regular expression for this would
    take the square of the time where tags are not closed."""
    closings: dict[str, list[int]] = {}
    for found in _CLOSING.finditer(block):
        closings.setdefault(found[1].lower(), []).append(found.start())
    after = mark = 0
    for opening in _OPENING.finditer(block):
        if opening.start() < after:
            continue
        if mark < opening.end():
            mark = block.find(">", opening.end())
        if mark < 0:
            return
        ends = closings.get(name := opening[1].lower(), [])
        if (place := bisect_left(ends, mark + 1)) < len(ends):
            after = block.index(">", ends[place]) + 1
            yield name, opening.start(), mark + 1, ends[place], after


def _plain(markup: str) -> str:
    """Return the text without tags. What follows the last `>` has none, and is not searched for their ends."""
    tagged, mark, rest = markup.rpartition(">")
    return f"{_TAG.sub(' ', tagged + mark)}{rest}".strip()


TOPICS = ("topics.tsv", "queries.tsv", "topics.trec", "topics.txt", "topics")
_QRELS = re.compile(r"qrels?(?:[._-](?P<split>[\w-]+?))??(?:\.(?:txt|tsv|qrels|trec))?(?:\.gz)?", re.ASCII)


def is_trec(path: Path) -> bool:
    """Return whether a folder holds topics, relevance files and documents, and no queries in the format of BEIR."""
    is_other = not path.is_dir() or tables.find_file(path, "queries.jsonl")
    return not is_other and _topics(path) is not None and bool(_qrels(path)) and bool(_documents(path))


def splits(folder: Path) -> tuple[str, ...]:
    """Return the names of the splits that have a relevance file, sorted."""
    return tuple(sorted(_qrels(folder)))


def read_corpus(folder: Path, fault: Fault = refuse) -> Iterator[Document]:
    """Yield all documents. Raises CorpusError: one is broken or repeats an id, unless `fault` lets it pass."""

    def read(path: Path) -> Iterator[tuple[str, Document]]:
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            return make_each(tables.rows([path], fault), tables.document_of_row, fault)
        return make_each(_blocks(path, "DOC", fault), _document, fault)

    located = chain.from_iterable(map(read, _documents(folder)))
    return (document for _, document in drop_repeated(located, lambda document: document.doc_id, fault))


def read_tasks(folder: Path, split: str, fault: Fault = refuse) -> list[Task]:
    """Return the topics that have a relevant document, in the order of their file. Raises CorpusError: as for
    `read_qrels`."""
    topics = drop_repeated(_questions(folder, fault), itemgetter(0), fault)
    questions = {number: text for _, (number, text) in topics}
    relevant = read_qrels(_qrels(folder)[split], questions, "topics", fault)
    return [
        Task(task_id=number, query=text, split=split, gold=Gold(relevant=relevant[number]))
        for number, text in questions.items()
        if number in relevant
    ]


def _questions(folder: Path, fault: Fault) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the place of each topic, with its number and its text."""
    path = _topics(folder)
    if path is None:
        raise CorpusError(f"{folder} has no topics: {', '.join(TOPICS)}")
    first = next((line for _, line in tables.numbered_lines(path) if line.strip()), b"")
    if first.strip().lower() == b"<top>":
        for where, block in _blocks(path, "top", fault):
            fields = {name.lower(): " ".join(value.split()) for name, value in _TOPIC_FIELD.findall(block)}
            if fields.get("num") and fields.get("title"):
                yield where, (fields["num"], fields["title"])
            else:
                fault(CorpusError(f"{where}: a topic needs <num> and <title>"))
        return
    for number, line in tables.numbered_lines(path, fault):
        columns = line.decode("utf-8", "replace").rstrip("\r\n").split("\t")
        if len(columns) == 2 and all(column.strip() for column in columns):
            yield f"{path}:{number}", (columns[0].strip(), columns[1])
        elif line.strip():
            fault(CorpusError(f"{path}:{number}: not `number, question` separated by a tab"))


def _topics(folder: Path) -> Path | None:
    return next((path for name in TOPICS if (path := tables.find_file(folder, name))), None)


def _qrels(folder: Path) -> dict[str, Path]:
    named = ((_QRELS.fullmatch(path.name), path) for path in sorted(folder.iterdir()) if path.is_file())
    return {found["split"] or "test": path for found, path in named if found}


def _documents(folder: Path) -> tuple[Path, ...]:
    corpus = tables.find_file(folder, "corpus.jsonl")
    if corpus:
        return (corpus,)
    topics = _topics(folder)
    found = [path for pattern in ("*.trec", "*.trec.gz", "corpus/*.trec*") for path in folder.glob(pattern)]
    found = [path for path in found if path != topics and not _QRELS.fullmatch(path.name)]
    return tuple(sorted(path for path in found if path.is_file()))
