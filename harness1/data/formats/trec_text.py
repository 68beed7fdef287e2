"""Documents and topics in TREC's own markup, as `<DOC>` and `<top>` blocks; plain or gzipped.

A document has a `<DOCNO>`, perhaps a title (`<TITLE>`, `<HEADLINE>`, `<HEAD>`, `<TI>`), and text: the content of
`<TEXT>`, or else all outside fields. A topic has a `<num>` and a `<title>`, with or without labels and closing tags.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

from harness1.data.faults import EmptyText, Fault, refuse
from harness1.data.formats.jsonl import LINE_BYTES, distinct_documents, numbered_lines
from harness1.errors import CorpusError
from harness1.records import DocId
from harness1.retrieval.corpus import Document

_OPENING, _CLOSING = re.compile(r"<(\w++)"), re.compile(r"</(\w++)\s*+>")
_TAG = re.compile(r"</?\w[^>]*>")
_TOPIC_FIELD = re.compile(r"<(num|title)>\s*(?:Number:|Topic:)?(.*?)(?=<|\Z)", re.DOTALL | re.IGNORECASE)
Topic = tuple[str, tuple[str, str]]
"""The place of a topic, with its number and its text."""
TITLES = ("title", "headline", "head", "ti")


def read_documents(path: Path, fault: Fault = refuse) -> Iterator[Document]:
    """Yield the documents of a file.

    Raises:
        CorpusError: a document has no number, no text, or a number that occurred before, unless `fault` lets it pass.
    """
    return distinct_documents(_blocks(path, "DOC", fault), _document, fault)


def read_topics(path: Path, fault: Fault = refuse) -> Iterator[Topic]:
    """Yield the topics of a file.

    Raises:
        CorpusError: a topic has no number or title, unless `fault` lets it pass.
    """
    for where, block in _blocks(path, "top", fault):
        fields = {name.lower(): " ".join(value.split()) for name, value in _TOPIC_FIELD.findall(block)}
        if fields.get("num") and fields.get("title"):
            yield where, (fields["num"], fields["title"])
        else:
            fault(CorpusError(f"{where}: a topic needs <num> and <title>"))


def _blocks(path: Path, tag: str, fault: Fault) -> Iterator[tuple[str, str]]:
    """Yield the text between each pair of opening and closing tags, each on its own line, with the line of the
    first."""
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
    """Yield the name of each field that has a closing tag, in lower case, and where its opening tag begins and ends and
    its closing tag begins and ends. One regular expression for this would take the square of the time where tags are
    not closed."""
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
