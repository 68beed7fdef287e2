"""Working memory: everything that the harness keeps for the policy, as one plain value (Harness-1, section 3: pool,
curated set with importance, full-text store, evidence graph, verification cache, search history)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice

import msgspec

from harness1.config import Env
from harness1.memory.dedup import Fingerprints
from harness1.memory.entities import SCANNED, Bridge, EntityHandles, EvidenceGraph, entity_key, extract, mentions
from harness1.memory.parts import CuratedSet, Forkable, HistoryLine, Pool, VerificationCache
from harness1.memory.question import SCANNED_CHARACTERS, head, normalise_name, read_question
from harness1.memory.ranking import Assessment, EvidenceValue, Lead
from harness1.memory.sentences import WORDS
from harness1.plain import digest
from harness1.records import ChunkId, Hit, Ranking, Unit, UnitId


class WorkingMemory(Forkable, dict=True):
    """The state of an episode. Only tools change it; `fork` copies it and shares texts and signatures."""

    query: str
    turn: int = 0
    pool: Pool = msgspec.field(default_factory=Pool)
    curated: CuratedSet = msgspec.field(default_factory=CuratedSet)
    store: dict[ChunkId, Hit] = {}  # the full text of every chunk ever returned, which later searches exclude
    evidence: EvidenceGraph = msgspec.field(default_factory=EvidenceGraph)
    fingerprints: Fingerprints = msgspec.field(default_factory=Fingerprints)
    verification: VerificationCache = msgspec.field(default_factory=VerificationCache)
    history: list[HistoryLine] = []
    auto_populated: bool = False
    since_curation: int = 0  # turns since the last curation
    tools_used: dict[str, int] = {}  # the tools that had an effect, each with the first such turn
    entities: EntityHandles = msgspec.field(default_factory=EntityHandles)  # empty without `Env.has_handles`
    value: EvidenceValue = msgspec.field(default_factory=EvidenceValue)  # empty without `Env.ranks`

    @classmethod
    def empty(cls, query: str, unit: Unit) -> WorkingMemory:
        return cls(query, pool=Pool(unit))

    def absorb(self, hits: Iterable[Hit], env: Env) -> tuple[list[UnitId], dict[UnitId, UnitId]]:
        """Take hits in; return the units that are new in the pool, and near duplicates with their representatives."""
        self.__dict__.pop("assessment", None)
        new: list[UnitId] = []
        aliases: dict[UnitId, UnitId] = {}
        for hit in hits:
            if hit.chunk_id in self.store:
                continue
            self.store[hit.chunk_id] = hit
            unit_id = self.pool.unit_of(hit)
            if env.has("dedup") and unit_id not in self.pool.entries:
                twin = self.fingerprints.match(hit.chunk_id, hit.title, hit.text)
                if twin is not None:
                    self.pool.aliases[unit_id] = aliases[unit_id] = self.pool.unit_of(self.store[ChunkId(twin)])
                    continue
            aliases.pop(unit_id, None)
            parts = [hit]
            if unit_id in self.pool.aliases:  # it stops being a near duplicate, and becomes visible with all its chunks
                parts = [stored for stored in self.store.values() if self.pool.unit_of(stored) == unit_id]
            for part in parts:
                if self.pool.add(part, self.turn):
                    new.append(unit_id)
                self._index(part, unit_id, env)
        return new, aliases

    def take_rankings(self, rankings: Sequence[Ranking], hits: Iterable[Hit], env: Env) -> None:
        """Take in at which ranks a search found the units of its shown hits."""
        if env.ranks:
            self.__dict__.pop("assessment", None)
            units = ((hit, self.pool.unit_of(hit)) for hit in hits)
            found = {str(hit.chunk_id): (unit, hit.score) for hit, unit in units if unit in self.pool.entries}
            self.value.rank(rankings, found, self.query)

    def assess(self) -> Assessment:
        """Return the pooled units by evidence value, and the names to search next, if units are ranked."""
        # No field, so that it is neither copied nor compared; whatever it is computed from forgets it on a change.
        if "assessment" not in self.__dict__:
            self.__dict__["assessment"] = self.value.assess(self.query)
        found: Assessment = self.__dict__["assessment"]
        return found

    def name_entities(self, texts: Iterable[str], env: Env) -> None:
        """Give handles to the entities of shown texts, in text order."""
        if env.has("entity_handles"):
            for text in texts:
                self.entities.add(name for _, name in mentions(text, SCANNED))

    def name_leads(self, env: Env) -> None:
        """Give handles to the names among the leads that the next context shows."""
        if env.has_handles and env.leads_on:
            whole = env.leads_have_handles
            shown = (lead for lead in self.shown_leads(env) if whole or not lead.is_part)
            self.entities.add(" ".join(lead.name.split()) for lead in shown)

    def shown_leads(self, env: Env) -> Sequence[Lead]:
        leads: Iterable[Lead] = self.assess().leads
        if env.has("marks"):  # no document makes a word of the environment a lead
            leads = (lead for lead in leads if entity_key(lead.name) not in WORDS["own"])
        return tuple(islice(leads, env.leads.lines))

    def text_of(self, unit_id: UnitId) -> str:
        return "\n".join(hit.text for hit in self.hits_of(unit_id))

    def hits_of(self, unit_id: UnitId) -> list[Hit]:
        hits = [self.store[chunk_id] for chunk_id in self.pool.entries[unit_id].chunk_ids]
        return sorted(hits, key=lambda hit: hit.index)

    def hash(self) -> str:
        """Return the hash of ids, tags, aliases, verdicts, history, handle order and turn; no texts, scores, counts."""
        state = {
            "turn": self.turn,
            # Handles follow from the order in which documents and units came.
            "documents": list(self.pool.numbers),
            "pool": list(self.pool.entries),
            "chunks": list(self.store),
            "curated": list(self.curated.tags.items()),
            "aliases": list(self.pool.aliases.items()),
            "verdicts": [[each.unit_id, each.claim, each.label] for each in self.verification.verdicts.values()],
            "history": self.history,
            "auto_populated": self.auto_populated,
        }
        return digest(state | {"entities": self.entities.names} if self.entities.names else state)

    def _index(self, hit: Hit, unit_id: UnitId, env: Env) -> None:
        if env.has("dedup"):
            self.fingerprints.add(hit.chunk_id, hit.title, hit.text)
        if env.has("evidence"):
            self.evidence.add(unit_id, extract(hit.text, SCANNED))
        if env.ranks:
            self.value.add(unit_id, hit, self.query)


BEST = 10  # units at the top of the evidence order whose names are compared with those of all others


def bridge_documents(memory: WorkingMemory, order: Sequence[UnitId], most: int) -> list[tuple[UnitId, tuple[str, ...]]]:
    """Return the units that link two names of the question or more, with these in its order: those with the most names
    first, then by evidence (`order`, the best first). A unit covers the names that its title or its text has. If it
    covers one and has none as its title, it also links the names whose own units name it. (The bridge documents of
    Harness-1, arXiv 2606.02373, have two frequent entities; names of the question say more than frequency.)"""
    names = question_names(memory.query)
    if len(names) < 2:
        return []
    titled = _by_title(memory)
    links: dict[UnitId, set[str]] = {}
    for name in names:
        for unit_id in (*memory.evidence.units_of(name), *titled(name)):
            links.setdefault(unit_id, set()).add(name)
    about = {name: titled(name) for name in names}
    between = links.keys() - {unit_id for units in about.values() for unit_id in units}
    for name in names:
        for source in about[name]:
            named = (unit_id for key in memory.evidence.entities.get(source, ()) for unit_id in titled(key))
            for unit_id in between.intersection(named):
                links[unit_id].add(name)
    found = [
        (unit_id, tuple(name for name in names if name in links[unit_id]))
        for unit_id in order
        if len(links.get(unit_id, ())) > 1
    ]
    return sorted(found, key=lambda bridge: -len(bridge[1]))[:most]


def rare_bridges(memory: WorkingMemory, order: Sequence[UnitId], limit: int, documents: int) -> list[Bridge]:
    """Return names that the best units share with other documents, and that neither the question nor a title has, with
    their first `documents` units. They come by the mean strength of the units that have them, which is 1 / (2 + place)
    among the best, else 0, so that a name of many units comes late; ties in order of the units."""
    graph, titled = memory.evidence, _by_title(memory)
    asked = read_question(memory.query).flat
    strength: dict[str, float] = {}
    for place, unit_id in enumerate(order[:BEST]):
        for key in graph.entities.get(unit_id, ()):
            if (units := len(graph.units[key])) > 1:
                strength[key] = strength.get(key, 0.0) + 1 / (2 + place) / units

    def leads_on(key: str) -> bool:
        holders = {memory.pool.entries[unit_id].doc_id for unit_id in graph.units[key]}
        is_number = key.rstrip("s").replace("/", "").isdecimal()
        return not is_number and len(holders) > 1 and f" {normalise_name(key)} " not in asked and not titled(key)

    leading = islice(filter(leads_on, sorted(strength, key=lambda key: -strength[key])), limit)
    return [Bridge(graph.names[key], graph.units[key][:documents], len(graph.units[key])) for key in leading]


@lru_cache(maxsize=256)
def question_names(question: str) -> tuple[str, ...]:
    """Return the names in a question, each once, without numbers and without names inside longer ones."""
    found: dict[str, str] = {}
    for _, name in mentions(question, SCANNED_CHARACTERS):
        found.setdefault(entity_key(name), name)
    return tuple(found.values())


def _by_title(memory: WorkingMemory) -> Callable[[str], list[UnitId]]:
    units, heads = list(memory.value.numbers), memory.value.names.heads
    return lambda name: [units[number] for number in heads.get(head(name), ())]
