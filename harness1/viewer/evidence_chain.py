"""What leads from a question to its documents: names that a search took from the question or from documents found
before, and names by which documents point at each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from harness1.memory.question import SCANNED_CHARACTERS, head, normalised_name
from harness1.memory.working_memory import WorkingMemory, question_names
from harness1.records import UnitId
from harness1.viewer.tables import Tables

WORDS = 7
"""Words of the longest name that is looked for in a query."""
SOURCES = 4
"""Limit of the documents listed as the source of a name."""
LINKS = 200
"""Limit of the links between documents of an episode."""
_AROUND = " ,.;:?!'\"()“”’"


class EvidenceChain:
    """The names in the searches of one episode; `see` is called before every turn, with the memory at that moment."""

    def __init__(self) -> None:
        self._memory: WorkingMemory | None = None
        self._titled: dict[str, list[UnitId]] = {}
        self._read = 0

    def see(self, memory: WorkingMemory) -> None:
        """Take in the documents found so far."""
        self._memory = memory
        entries = memory.pool.entries
        for unit_id, entry in islice(entries.items(), self._read, None):
            if entry.title:
                self._titled.setdefault(head(entry.title), []).append(unit_id)
        self._read = len(entries)

    def names_in(self, query: str, tables: Tables) -> list[Any]:
        """Return the names in a query: each with the documents that told it, or with None if the question has it."""
        if self._memory is None:
            return []
        asked = {head(name) for name in question_names(self._memory.query)}
        question = f" {normalised_name(self._memory.query)} "
        found: list[Any] = []
        words = query[:SCANNED_CHARACTERS].split()
        at = 0
        while at < len(words):
            for name, size in _names_from(words, at):
                if head(name) in asked:
                    found.append([name, None])
                elif f" {normalised_name(name)} " not in question and (holders := self._holders(name)):
                    found.append([name, [tables.unit(each) for each in holders[:SOURCES]]])
                else:
                    continue
                at += size - 1
                break
            at += 1
        return found

    def as_json(self, relevant: Iterable[UnitId], tables: Tables) -> dict[str, Any]:
        """Return the names of the question, and the links between relevant documents: one that names the title of
        another."""
        if self._memory is None:
            return {"names": [], "links": []}
        self.see(self._memory)
        links = islice(self._links(self._memory, dict.fromkeys(relevant)), LINKS)
        return {
            "names": list(question_names(self._memory.query)),
            "links": [[tables.unit(source), name, tables.unit(target)] for source, name, target in links],
        }

    def _links(self, memory: WorkingMemory, relevant: dict[UnitId, None]) -> Iterator[tuple[UnitId, str, UnitId]]:
        for source in relevant:
            for name in memory.evidence.entities_of(source):
                for target in self._titled.get(head(name), ()):
                    if target in relevant and target != source:
                        yield source, name, target

    def _holders(self, name: str) -> list[UnitId]:
        """Return the known documents that mention a name, or else those that have it as their title; curated ones come
        first."""
        assert self._memory is not None
        titled = self._titled.get(head(name), [])
        mention = [each for each in self._memory.evidence.units_of(name) if each not in titled]
        curated = self._memory.curated.tags
        return sorted(mention or titled, key=lambda each: each not in curated)


def _names_from(words: list[str], at: int) -> Iterator[tuple[str, int]]:
    """Yield what may be a name and begins with a word, the longest first, with its number of words; one word alone is a
    name only with a capital letter or a digit."""
    for size in range(min(WORDS, len(words) - at), 0, -1):
        name = " ".join(words[at : at + size]).strip(_AROUND)
        if name and (size > 1 or name != name.lower() or any(map(str.isdigit, name))):
            yield name, size
