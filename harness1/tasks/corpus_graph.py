"""The names of a whole corpus: which passages hold them, and which passages are about them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import unescape

from harness1.memory import sentences
from harness1.memory.entities import extract
from harness1.memory.evidence import entity_key
from harness1.memory.question import head
from harness1.records import DocId
from harness1.retrieval.corpus import Document
from harness1.tasks.unwrapping import unwrapped

READ = 4000
"""Characters of a document that tasks are made from; the rest is read only for other documents that answer."""
NUMBER = re.compile(r"[\d/s]+")
IDENTIFIER = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w.])|(?<![\w.])[A-Za-z]\w*_\w+(?![\w.])")
"""Names of things in code, which have no capitals."""
_SMALL = re.compile(r"(?<![\w-])[a-z]{3,}(?![\w-])")
_WORD = re.compile(r"[^\W\d_]{3}")
_BRACKETS = re.compile(r"\s*[(\[].*?[)\]]")
_SECTION = re.compile(r"\s+[-–—|]\s+")


@dataclass(frozen=True)
class Passage:
    """A document as tasks see it."""

    doc_id: DocId
    subject: str
    """What its title names, without brackets and sections; "" where the title names nothing."""
    sentences: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    """The names in each sentence, in order; no years and dates."""
    text: str
    """The whole text; the lines of a paragraph are joined."""
    is_section: bool = False
    """True if its title names a section of something larger."""


@dataclass
class CorpusGraph:
    """Passages, and for each name (`entity_key`) the places of those that hold it, and of those that are about it."""

    passages: list[Passage] = field(default_factory=list)
    holders: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    about: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    small: set[str] = field(default_factory=set)
    """Words that the corpus writes without a capital."""
    fit: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    """For passages that were asked for, the sentences that can be quoted, with their numbers (`quoting.quotable`)."""

    def add(self, document: Document) -> None:
        """Add a document."""
        whole = unwrapped(document.text)
        text = whole[:READ]
        cut = sentences.split(text)
        self.small.update(_SMALL.findall(text))
        known = {name for name in extract(text, READ) if not NUMBER.fullmatch(name)}
        names = tuple((*(name for name in extract(each, READ) if name in known), *identifiers(each)) for each in cut)
        place = len(self.passages)
        is_section = _SECTION.search(document.title) is not None
        passage = Passage(document.doc_id, subject_of(document.title), cut, names, whole, is_section)
        self.passages.append(passage)
        for key in {entity_key(name) for each in names for name in each}:
            self.holders[key].append(place)
        if passage.subject:
            self.about[head(document.title)].append(place)

    def titled(self, name: str) -> int | None:
        """Return the only passage that is about a name, or None."""
        found = self.about.get(head(name), ())
        return found[0] if len(found) == 1 else None


def identifiers(sentence: str) -> list[str]:
    """Return the names of things in code that a sentence holds, each once."""
    return list(dict.fromkeys(IDENTIFIER.findall(sentence))) if "_" in sentence or "." in sentence[:-1] else []


def graph_of(documents: Iterable[Document]) -> CorpusGraph:
    """Return the graph of a corpus; its time is linear in the text."""
    graph = CorpusGraph()
    for document in documents:
        graph.add(document)
    return graph


def subject_of(title: str) -> str:
    """Return the name in a title, or "" if it is a sentence, a file or a page rather than a name."""
    bare = _SECTION.split(_BRACKETS.sub("", unescape(title)).strip())[0].strip()
    words = bare.split()
    if not words or len(words) > 8 or bare.endswith((".", "?", "!", ":")) or not bare[0].isalnum():
        return ""
    if not _WORD.search(bare):
        return ""  # no search finds "No. 2"
    return bare
