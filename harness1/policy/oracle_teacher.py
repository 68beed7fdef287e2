"""The oracle teacher: an example to imitate. It searches, curates and stops with knowledge of the gold but never
reveals it: every word that it writes is in the question, an earlier view or `reasons.toml`."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from importlib import resources
from itertools import islice, pairwise
from typing import NamedTuple

import msgspec

from harness1.env.render import Context
from harness1.env.view import View
from harness1.memory.entities import FUNCTION_WORDS, extract, in_handles
from harness1.memory.question import (
    QUESTION_WORDS,
    SCANNED_CHARACTERS,
    claim,
    head,
    mentions,
    normalise_name,
    relatedness,
    relation_stems,
)
from harness1.memory.sentences import split
from harness1.plain import digest
from harness1.policy.oracles import GoldPolicy, SeenEvidence
from harness1.policy.policy import CopiedSession, Decision
from harness1.policy.scripted import FAN_OUT, SPARE_TURNS, curate_call, is_full, search_call
from harness1.records import Tag, ToolCall, UnitId
from harness1.tools.documents import END_SEARCH, MIN_CLAIM_CHARACTERS
from harness1.tools.tool import ToolSpec

LOOK, GREPS = 0.4, 0.3  # shares of episodes that review the set before pruning, and that begin with a pattern
NEAR = (0, 2)  # range of the number of best other documents that are delivered as well
GUESSES = 2  # fewest documents delivered if no gold was found
CHECKED, REVIEWED = 3, 5
REVISION = 7  # increased whenever the teacher, or a part of it elsewhere, decides or writes differently


class Move(NamedTuple):
    """An action, the kind of reason for it, and the shown handles and names that the reason mentions."""

    call: ToolCall
    kind: str
    source: tuple[str, ...] = ()
    topic: tuple[str, ...] = ()


class TeacherSession(CopiedSession):
    """One episode: search while evidence is missing, verify, curate, review, prune, end."""

    def __init__(self, needs: tuple[frozenset[UnitId], ...], style: random.Random) -> None:
        self._style, self._evidence = style, SeenEvidence(needs)
        self._near, self._reviews = style.randint(*NEAR), style.random() < LOOK
        self._search = TeacherSearch(greps=style.random() < GREPS)
        self._searches, self._verified = True, False
        self._chosen: dict[str, Tag] = {}  # tags of the documents to deliver, by handle; empty until decided

    async def act(self, context: Context) -> Decision:
        self._evidence.read(context.view)
        move = self._next(context.view, self._evidence, context.tools)
        call, entities = move.call, context.view.entities
        match call.arguments:
            case {"query": str(query)}:
                call = ToolCall(call.name, {"query": in_handles(query, entities)})
            case {"queries": list(queries)}:
                call = ToolCall(call.name, {"queries": [in_handles(query, entities) for query in queries]})
        return Decision((call,), line(move.kind, self._style.randrange(60), move.source, move.topic))

    def _next(self, view: View, evidence: SeenEvidence, tools: Sequence[ToolSpec]) -> Move:
        names = {spec.name for spec in tools}
        left = view.budget.turns_left()
        if self._searches and evidence.documents and is_full(view):
            gold = {document.handle for document in evidence.gold}
            shown = dict.fromkeys(hit.document.handle for hits in view.hits.values() for hit in hits)
            useless = [handle for handle in shown if handle not in gold]
            if useless and "prune_chunks" in names:
                call = ToolCall("prune_chunks", {"doc_ids": useless})
                return Move(call, "make_room", tuple(gold), subject(view.query))
            self._searches = False
        if self._searches and (not evidence.documents or left is None or left > SPARE_TURNS - ("verify" not in names)):
            if left is None and (move := self._keep(view, evidence, tools)) is not None:
                return move
            if (move := self._search.next(view, evidence, names)) is not None:
                return move
        self._searches = False
        topic, ending = subject(view.query), "end" if evidence.complete else "give_up"
        reason = line(f"{ending}_argument", 0, topic=topic)
        end = Move(ToolCall(END_SEARCH, {"reasoning": reason}), ending, topic=topic)
        if not self._chosen:
            return self._verify(view, evidence, names) or self._curate(view, evidence, tools) or end
        if self._reviews:
            self._reviews = False
            held = (entry.handle for entry in view.curated if entry.handle not in self._chosen)
            handles = [*self._chosen, *held][:REVIEWED]
            return Move(ToolCall("review_docs", {"doc_ids": handles}), "review", tuple(handles))
        firm = tuple(handle for handle, tag in self._chosen.items() if tag in ("very_high", "high"))
        return self._edit(view, tools, Move(ToolCall("curate"), "prune", firm or tuple(self._chosen))) or end

    def _keep(self, view: View, evidence: SeenEvidence, tools: Sequence[ToolSpec]) -> Move | None:
        """Curate new finds at once: when the remaining turns are not shown, each may be the last."""
        held = {entry.handle for entry in view.curated}
        new = [document.handle for document in evidence.gold if document.handle not in held]
        if not new or len(held) + len(new) > view.cap:
            return None
        return Move(curate_call(tools, dict.fromkeys(new, "high")), "keep", tuple(new))

    def _verify(self, view: View, evidence: SeenEvidence, names: Set[str]) -> Move | None:
        left, statement = view.budget.turns_left(), shorten(claim(view.query))
        found = [document.handle for document in evidence.gold[:CHECKED]]
        handles = [*found, *evidence.rivals()[:1]]
        late = left is not None and left < SPARE_TURNS
        if self._verified or late or "verify" not in names or not handles or len(statement) < MIN_CLAIM_CHARACTERS:
            return None
        self._verified = True
        call = ToolCall("verify", {"doc_ids": handles, "claim": statement})
        return Move(call, "verify", tuple(found or handles), subject(view.query))

    def _curate(self, view: View, evidence: SeenEvidence, tools: Sequence[ToolSpec]) -> Move | None:
        found = tuple(document.handle for document in evidence.gold)
        supported = {verdict.handle for verdict in view.verdicts if verdict.label == "yes"}
        tags: dict[str, Tag] = {handle: "very_high" for handle in found if handle in supported}
        tags |= {handle: "high" for handle in found if handle not in supported}
        misses = self._near if tags else max(self._near, GUESSES)
        tags |= dict.fromkeys(evidence.rivals()[:misses], "fair")
        self._chosen = dict(list(tags.items())[: view.cap])
        if not self._chosen:
            return None
        left, held = view.budget.turns_left(), {entry.handle for entry in view.curated}
        self._reviews &= any(spec.name == "review_docs" for spec in tools) and (left is None or left > SPARE_TURNS)
        self._reviews &= not held <= self._chosen.keys()
        sure = tuple(handle for handle in found if handle in supported)
        alone = "alone" if len(found) == len(self._chosen) else "curate"
        kind = "guess" if not found else "select" if self._reviews else "confirmed" if sure else alone
        source = sure if kind == "confirmed" else found
        return self._edit(view, tools, Move(ToolCall("curate"), kind, source, subject(view.query)))

    def _edit(self, view: View, tools: Sequence[ToolSpec], move: Move) -> Move | None:
        """Curate the difference to what was chosen; removals wait for a review. Without tags the order is new."""
        tagged = any("importance" in spec.parameters["properties"] for spec in tools if spec.name == "curate")
        held = {entry.handle: entry.tag for entry in view.curated}
        add = {name: tag for name, tag in self._chosen.items() if name not in held or (tagged and held[name] != tag)}
        remove = [] if self._reviews else [handle for handle in held if handle not in self._chosen]
        if not add and not remove:
            return None
        if not tagged and not self._reviews:
            add, remove = self._chosen, list(held)
        call = curate_call(tools, add, remove) if add else ToolCall("curate", {"remove_ids": remove})
        # A line may only speak of removal if something is removed: otherwise use the line that does not.
        kind = "tag" if move.kind in ("curate", "alone", "confirmed") and not remove else move.kind
        return move._replace(call=call, kind=kind)


class OracleTeacher(GoldPolicy):
    """A teacher that shows how to search when the gold is known."""

    name = "oracle-teacher"
    hash = digest(["oracle-teacher", REVISION])
    session = TeacherSession


FAN = 4
PLAN = ("grep", "names", "read", "names", "page", "parts")  # kinds of moves, in rotation; what has none is skipped
PATIENCE, MOST = 7, 12  # moves without new evidence after which the search is given up, and moves in all
SENTENCES = 4  # a text with this many shown sentences may have more, and so may one with as many as any other
CHARACTERS = 2000  # most characters of a query or claim


class TeacherSearch:
    """Chooses queries, patterns and documents to read; it repeats only the question, to get its next page."""

    def __init__(self, greps: bool = False) -> None:
        self._asked, self._read = set[str](), set[str]()
        self._place = 0 if greps else 1
        self._found = self._fruitless = self._moves = 0

    def next(self, view: View, evidence: SeenEvidence, tools: Set[str]) -> Move | None:
        """Return the next move; None if all is found or the search is given up."""
        if not self._asked:
            query = view.query
            if names := [name for name in view.entities.values() if name in query]:
                # Entities with handles, and the last words before the first, which say what about it is meant.
                words = _words_without(query.partition(names[0])[0], mentions(query))
                query = " ".join([*names, *words[-FACET:]])
            self._asked |= {normalise_name(query), normalise_name(view.query)}
            return Move(_search(query), "open", topic=subject(view.query))
        found = len(evidence.gold)
        self._fruitless = 0 if found > self._found else self._fruitless + 1
        self._found = found
        self._moves += 1
        if evidence.complete or self._fruitless > PATIENCE or self._moves > MOST:
            return None
        for _ in PLAN:
            kind = PLAN[self._place % len(PLAN)]
            self._place += 1
            if (move := self._move(kind, view, evidence, tools)) is not None:
                return move
        return None

    def _move(self, kind: str, view: View, evidence: SeenEvidence, tools: Set[str]) -> Move | None:
        fan = FAN if FAN_OUT in tools else 1
        match kind:
            case "read" if "read_document" in tools:
                return self._read_gold(evidence)
            case "grep" if "grep_corpus" in tools:
                names = (lead.name for lead in next(name_queries(evidence)) if _LITERAL.fullmatch(lead.name))
                if pattern := next((name for name in names if self._is_new(f"grep {name}")), ""):
                    return Move(ToolCall("grep_corpus", {"pattern": pattern}), "grep", topic=(pattern,))
            case "names":
                for group in name_queries(evidence):
                    if chosen := list(islice((lead for lead in group if self._is_new(lead.query)), fan)):
                        first = chosen[0]
                        alike = dict.fromkeys(lead.name for lead in chosen if lead[2:] == first[2:])
                        source = (first.source,) if first.source else ()
                        return Move(_search(*(lead.query for lead in chosen)), first.kind, source, tuple(alike))
            case "parts":
                if queries := list(islice(filter(self._is_new, parts(view.query)), fan)):
                    return Move(_search(*queries), "part", topic=tuple(queries))
            case "page" if view.query.strip() and not view.entities:
                return Move(_search(view.query), "page", topic=subject(view.query))
        return None

    def _read_gold(self, evidence: SeenEvidence) -> Move | None:
        """Read a gold document that may not have been shown in full, the latest first."""
        most = max((len(split(document.text)) for document in evidence.documents.values()), default=0)
        for document in reversed(evidence.gold):
            if document.handle not in self._read and len(split(document.text)) >= min(SENTENCES, most):
                self._read.add(document.handle)
                return Move(ToolCall("read_document", {"doc_id": document.handle}), "read", (document.handle,))
        return None

    def _is_new(self, query: str) -> bool:
        key = normalise_name(query)
        if not key or key in self._asked:
            return False
        self._asked.add(key)
        return True


def shorten(text: str) -> str:
    """Cut a text to as many whole words as an argument may hold."""
    return text if len(text) <= CHARACTERS else text[:CHARACTERS].rpartition(" ")[0] or text[:CHARACTERS]


def _search(*queries: str) -> ToolCall:
    return search_call(*map(shorten, queries))


COMMON = 3  # a single word that more other documents name than this is too common to search for
LOUD = 5  # a longer word in capitals is a heading
FACET = 3
SHORTEST = 4  # fewest content words of a question that is taken apart

_WORD = re.compile(r"[^\W_](?:[\w'’./-]*\w)?")
_LITERAL = re.compile(r"[\w ,'-]+")


class NameQuery(NamedTuple):
    """A query, the name that it follows, the handle of the document that has the name (empty: the question), and its
    kind of reason."""

    query: str
    name: str
    source: str = ""
    kind: str = "asked"


def name_queries(evidence: SeenEvidence) -> Iterator[list[NameQuery]]:
    """Yield groups of queries about names: those in the question or near its relation words in gold, without a document
    yet; other names in gold, and leads; names with words of the question, and adjacent names."""
    question = evidence.view.query
    known = {head(document.title) for document in evidence.documents.values()}
    texts = (document.text for document in evidence.documents.values())
    counts = Counter(key for text in texts for key in set(map(head, extract(text, SCANNED_CHARACTERS))))

    def tells(name: str) -> bool:
        key = head(name)
        common = " " not in key and counts[key] > COMMON
        loud = any(len(word) > LOUD and word.isupper() for word in name.split())
        return len(key) > 2 and key not in known and not key.isdecimal() and not common and not loud

    near, far, joined = dict[str, tuple[float, NameQuery]](), dict[str, NameQuery](), list[NameQuery]()
    relations, own = relation_stems(question), [NameQuery(name, name) for name in topics(question)]
    for document in reversed(evidence.gold):
        text = f"{document.title}. {document.text}"
        names = extract(text, SCANNED_CHARACTERS)
        pairs = (f"{name} {follower}" for name, follower in pairwise(names))
        joined += [NameQuery(pair, pair, document.handle, "named") for pair in pairs]
        for name in filter(tells, names):
            lead = NameQuery(name, name, document.handle, "named")
            if value := relatedness(text, name, relations):
                near.setdefault(head(name), (value + (" " in name) / 2, lead))
            else:
                far.setdefault(head(name), lead)
    nearest = [lead for _, lead in sorted(near.values(), key=lambda found: -found[0])]
    yield [*(lead for lead in own if tells(lead.name)), *nearest]
    others = sorted((lead for key, lead in far.items() if key not in near), key=lambda lead: " " not in lead.name)
    leads = [(lead.name, next(iter(lead.handles), "")) for lead in evidence.view.leads if head(lead.name) not in known]
    yield [*others, *(NameQuery(name, name, source, "named" if source else "asked") for name, source in leads)]
    detailed = [
        NameQuery(f"{lead.name} {words}", lead.name, lead.source, "detail")
        for lead in (*own, *nearest, *others)
        if (words := " ".join(_words_without(question, [lead.name, *mentions(question)])[:FACET]))
    ]
    yield [*detailed, *joined]


def topics(question: str) -> list[str]:
    """Return the names in a question, those of several words first, without years and parts of longer names."""
    names = {f" {normalise_name(name)} ": name for name in mentions(question) if not normalise_name(name).isdecimal()}
    # A run of capitals is more than a name if it has the opening word, or two sides of a choice.
    opens = FUNCTION_WORDS | QUESTION_WORDS
    runs = {key for key, name in names.items() if question.startswith(name) and name.split()[0].lower() in opens}
    inner = [key for key, name in names.items() if key not in runs and " or " not in name] or list(names)
    whole = [names[key] for key in inner if not any(key != other and key in other for other in inner)]
    return sorted(whole, key=lambda name: " " not in name)


def subject(question: str) -> tuple[str, ...]:
    """Return briefly what a question is about: its names, or else its first content words."""
    return tuple(topics(question) or filter(None, [" ".join(content_words(question)[:FACET])]))


def _words_without(text: str, names: Iterable[str]) -> list[str]:
    named = set(normalise_name(" ".join(names)).split())
    return [word for word in content_words(text) if normalise_name(word) not in named]


def parts(question: str) -> list[str]:
    """Return stretches of a question's own words, for a corpus where the whole question finds something else."""
    words = content_words(question)
    if len(words) < SHORTEST:
        return [" ".join(words)] if words else []
    half = len(words) // 2
    telling = set(sorted(words, key=lambda word: -len(word))[: max(3, half)])
    windows = (words[start : start + 3] for start in range(0, len(words) - 2, 2))
    cut = (words[:half], words[half:], [word for word in words if word in telling], words[::2], words[1::2], *windows)
    return list(dict.fromkeys(" ".join(part) for part in cut))


def content_words(question: str) -> list[str]:
    """Return the distinct content words, spelled as in the question."""
    words = {normalise_name(word): word for word in reversed(_WORD.findall(question))}
    return [word for key, word in reversed(words.items()) if key and key not in FUNCTION_WORDS | QUESTION_WORDS]


LINES = msgspec.toml.decode(
    resources.files(__package__).joinpath("reasons.toml").read_bytes(), type=dict[str, tuple[str, ...]]
)
SLOT_WORDS = 6


def line(kind: str, choice: int, source: Sequence[str] = (), topic: Sequence[str] = ()) -> str:
    """Return one of the lines of a kind. `source` are handles of shown documents, `topic` are shown names or words."""

    def listed(items: Sequence[str]) -> str:
        short = [" ".join(item.split()[:SLOT_WORDS]) for item in items]
        return " and ".join(part for part in (", ".join(short[:-1]), *short[-1:]) if part)

    chosen = LINES[kind][choice % len(LINES[kind])]
    return chosen.format(source=listed(source[:3]) or "it", topic=listed(topic[:2]) or "the question")
