"""Pieces: the stretches of text that make up a context; the opening ones, and notes in the words that a policy reads.
Every piece starts with a visible character and ends with exactly one newline, so that the token ids of joined pieces
equal the token ids of the whole, for byte-level and word-level tokenizers alike."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import resources
from typing import Any, Literal, NamedTuple, Protocol, Self

import msgspec

from harness1.config import Env
from harness1.env.view import MemoryView, QueryView
from harness1.memory.entities import QUESTION, SCANNED
from harness1.memory.parts import POPULATED_TAG
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import text_digest
from harness1.records import ModelCall, Note, Record, ToolCall
from harness1.retrieval.corpus import approximate_tokens
from harness1.tools.discovery import MOST_QUERIES
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec, one_line

LONGEST_ACTION = 1000  # characters shown of a policy's own call or reasoning where there are no sampled tokens
Role = Literal["system", "user", "assistant", "tool"]
HALFWAY, WARNING, CRITICAL = 0.60, 0.75, 0.90  # shares of the prompt used: half is over, finish soon, end at once


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a context. `key` names kind and content; `shows` is the value that the text puts into words. A piece
    with `turn_ref` stands for the policy's own output of that turn. `call` is the model call that sampled it: a chat
    format inserts its ids unchanged; for policies without tokens, `text` takes their place."""

    key: str
    role: Role
    text: str
    turn_ref: int | None = None
    shows: Record | None = field(default=None, compare=False)
    call: ModelCall | None = field(default=None, compare=False)


def piece(name: str, role: Role, text: str, shows: Record | None = None) -> Piece:
    """Make a piece; its text is stripped and closed by one newline."""
    body = text.strip() + "\n"
    return Piece(f"{name}#{text_digest(body)}", role, body, shows=shows)


def action_piece(turn: int, text: str, shows: Record | None, call: ModelCall | None) -> Piece:
    """Make the piece of a policy's own output, named by the sampled tokens if there are any."""
    body = text.strip() + "\n"
    content = ",".join(map(str, call.output_ids)) if call else body
    return Piece(f"action/{turn}#{text_digest(content)}", "assistant", body, turn, shows, call)


def group_messages(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces into messages: consecutive pieces of one role form one, and so does each output of the policy."""
    groups: list[list[Piece]] = []
    for each in pieces:
        if groups and groups[-1][0].role == each.role and each.turn_ref is None and groups[-1][0].turn_ref is None:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def write_action(reasoning: str, action: ToolCall) -> tuple[str, ToolCall]:
    """Return an output in words, where no tokens were sampled, and its call as shown: if cut, without arguments."""
    name, limit = one_line(action.name), LONGEST_ACTION
    words = f"{name} {json.dumps(action.arguments, ensure_ascii=False)}", " ".join(reasoning.split())
    call, thought = (text if len(text) <= limit else f"{text[:limit]} ({len(text)} characters)" for text in words)
    text = f"Action: {call}\nReasoning: {thought}" if thought else f"Action: {call}"
    return text, ToolCall(name, action.arguments if call == words[0] else {})


class TokenCounter(Protocol):
    """Counts tokens for the policy's model. Chat formats implement it; `hash` names tokenizer and format."""

    @property
    def hash(self) -> str: ...

    def piece(self, piece: Piece) -> int:
        """Return the tokens of a piece, without what its message adds."""

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        """Return the tokens of the tool declarations, and of all else that a prompt holds outside its messages."""

    def overhead(self, first: Piece) -> int:
        """Return the tokens that a message adds around its pieces if it begins with this one."""


PerToken = tuple[float, float, float]  # characters of a token, by kind: see `kinds_of`
TEMPLATE, TEMPLATE_TOOL = 100, 16  # tokens that a model's template adds to declarations of tools, and to each


def kinds_of(text: str) -> tuple[int, int, int]:
    """Return the characters of a text of one byte in UTF-8, of two, as most alphabets have, and of more, as Han has."""
    if text.isascii():
        return len(text), 0, 0
    ascii_only = len(text.encode("ascii", "ignore"))
    others = len(text) - ascii_only
    larger = min(len(text.encode("utf-8", "replace")) - ascii_only - 2 * others, others)
    return ascii_only, others - max(larger, 0), max(larger, 0)


class ApproximateCounter:
    """Counts four characters as a token: for policies without a model, and the same on every machine. Or as many as
    `per_token` says, for a model behind a server. The hash holds them, so that a record says how it was counted."""

    hash = "characters/4"

    def __init__(self, per_token: PerToken | None = None) -> None:
        self._per_token = per_token
        if per_token:
            self.hash = "characters/" + ",".join(map(str, per_token))

    @classmethod
    def of_hash(cls, hash_: str) -> Self | None:
        """Return the counter with this hash; None if it is of another class."""
        kind, _, numbers = hash_.partition("/")
        if kind != "characters":
            return None
        try:
            given = msgspec.convert(numbers.split(","), PerToken, strict=False)
        except msgspec.ValidationError:  # `cls.hash`, or one that nothing here writes
            return cls() if hash_ == cls.hash else None
        return cls(given) if all(0 < each < math.inf for each in given) else None

    def piece(self, piece: Piece) -> int:
        return self._count(piece.text)

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        declared = sum(self._count(f"{one.name} {one.description} {json.dumps(one.parameters)}") for one in specs)
        # A chat template of a model adds rules, and the shape of a declaration.
        return declared + (TEMPLATE + TEMPLATE_TOOL * len(specs) if self._per_token else 0)

    def overhead(self, first: Piece) -> int:
        return 4

    def _count(self, text: str) -> int:
        if self._per_token is None:
            return approximate_tokens(text)
        sizes = zip(kinds_of(text), self._per_token, strict=True)
        return math.ceil(sum(characters / each for characters, each in sizes))


def counter_of(policy: object) -> TokenCounter:
    """Return the environment's token counter for a policy: its chat format, or an approximation if it has none."""
    counter: TokenCounter | None = getattr(policy, "counter", None)
    return counter or ApproximateCounter()


class Drop(IntEnum):
    """Classes of pieces in the order in which a context over its budget drops them; `NEVER` is kept."""

    OLDER, POOL, HISTORY, EVIDENCE, OLD_HITS, CURATED_LINES, OLD_TURNS, LAST_HITS, NEVER = range(9)


class Block(NamedTuple):
    """Pieces that are kept or dropped together. Within a class earlier turns go first, then later blocks."""

    pieces: tuple[Piece, ...]
    drop: Drop = Drop.NEVER
    turn: int = 0


PLAIN = (
    "Find the documents that hold the answer to a question. You search; somebody else writes the answer.\n"
    "Search for one thing at a time, in a few words. When a document names something new that the question needs,"
    " search for that name next. Never write a query twice."
)


def static_piece(env: Env, toolbox: Toolbox) -> Piece:
    """Return the instructions, which never change within an episode and mention no mechanism that is off."""
    # Minimal and plain instructions do not say how many documents can be delivered.
    if env.rendering.instructions == "minimal":
        return piece("static", "system", "Curate the documents that answer the question.")
    if env.rendering.instructions == "plain":
        return piece("static", "system", PLAIN)
    lines = (_brief if env.rendering.instructions == "brief" else _full)(env, toolbox)
    return piece("static", "system", "\n".join(lines), MemoryView(cap=env.curation.cap))


def query_piece(memory: WorkingMemory, env: Env) -> Piece:
    """Return the question, with the handles of the entities that it names."""
    text, entities = question_text(memory.query), dict[str, str]()
    if env.has("entity_handles"):
        text, entities = memory.entities.mark(text, SCANNED)
    handle = QUESTION if env.leads_have_handles else ""
    label = f"Question ({handle})" if handle else "Question"
    return piece("query", "user", f"{label}: {text}", QueryView(question_text(memory.query), entities, handle))


def question_text(query: str) -> str:
    """Put a question on one line, as contexts show it."""
    return " ".join(query.split())


PRUNING = (
    "The context grows with every turn. Above {soft} tokens prune useless documents with prune_chunks, or conclude;"
    " above {hard} tokens only prune_chunks, curate and end_search are carried out."
)
RANKED = (
    "By evidence: documents in the order of all that speaks for them, with reasons. Deliver the best. Bridge documents"
    " link names of the question."
)
LEAD_HANDLES = "A query may be a handle: Q is the question, E3 the lead of that handle."
LEADS = "Search next: names that the question or strong documents mention and no search has found yet."
READING = (
    "Of a long document read_document shows the parts nearest to the question; D12.3 reads on from the third part."
)
NAMED = "Names are followed by handles such as (E3): a query may say E3 for the name."


def _brief(env: Env, toolbox: Toolbox) -> list[str]:
    seeded, seeds = env.auto_populate.documents, env.has("auto_populate") and not env.refills
    tags = "Tags: very_high states the answer, high is a needed link, fair may be useful, low is doubtful."
    told = {
        f"Find the documents that someone needs to answer the question. Your result is the curated set, at most"
        f" {env.curation.cap}. One tool call each turn: search, curate what is useful by its handle (such as D12),"
        " search again for what is missing, then end_search alone.": True,
        "Short queries; never the same one twice.": True,
        f"The best {seeded} by evidence stay curated until you curate.": env.refills,
        f"The first search curates its best {seeded}: remove what is useless.": seeds,
        tags: env.has("tags"),
        **_evidence(env),
        READING: "read_document" in toolbox.tools and env.read.by == "evidence",
        PRUNING.format(soft=env.pruning.limits[0], hard=env.pruning.limits[1]): env.has("pruning"),
    }
    return [words for words, on in told.items() if on]


def _full(env: Env, toolbox: Toolbox) -> list[str]:
    tools, tags, most, shown = toolbox.tools, env.has("tags"), MOST_QUERIES, env.compression.sentences
    seeded, seeds = env.auto_populate.documents, env.has("auto_populate") and not env.refills
    review = f" as {POPULATED_TAG}: re-tag or remove them." if tags else ": review them."
    meaning = "very_high = states part of the answer, high = needed link, fair = likely useful, low = doubtful."
    gives_up = " A full set gives up its least important entry for a more important one."
    once = "Short queries of 5 to 12 words. Never repeat a query: documents that were returned once do not come back."
    rules = {
        once: True,
        f"fan_out_search runs up to {most} different queries in one turn: begin with it.": "fan_out_search" in tools,
        "grep_corpus finds exact names, dates, numbers and quotations.": "grep_corpus" in tools,
        "read_document shows a whole document where the shown sentences are not enough.": "read_document" in tools,
        READING: "read_document" in tools and env.read.by == "evidence",
        "review_docs shows documents from memory again without a search.": "review_docs" in tools,
        f"Hits show the {shown} sentences nearest to the query, not the whole text.": env.has("compression"),
        "Curate often, a few documents at a time, and remove what turns out to be useless.": True,
        f"The best {seeded} documents by evidence stay curated until you curate.": env.refills,
        f"After the first search its best {seeded} documents are curated for you{review}": seeds,
        f"Tags: {meaning}{gives_up if env.curation.eviction == 'rank' else ''}": tags,
        "Shared entities link documents; an entity named in a good document may be the next hop.": env.has("evidence"),
        **_evidence(env),
        "Verify a claim before you rely on a document that must meet several constraints.": "verify" in tools,
        "Near duplicates are hidden behind the document that came first.": env.has("dedup"),
        PRUNING.format(soft=env.pruning.limits[0], hard=env.pruning.limits[1]): env.has("pruning"),
        f"The budget line shows used tokens and turns (at most {env.max_turns}). Above {WARNING:.0%} finish within 3"
        f" turns, above {CRITICAL:.0%} at once.": env.has("budget_marker") and not env.has("pruning"),
        "Call end_search alone, when the set is complete or nothing more can be found.": True,
    }
    return [
        "You are a search agent. You do not answer the question: you collect the documents that someone else needs to"
        f" answer it. Your result is the curated set, at most {env.curation.cap} documents.",
        "Each turn you take exactly one action, a call of one tool. The harness keeps what was found: documents have"
        " handles such as D12 (D12.3 is the third part of D12), and every handle stays valid.",
        "Work in a loop: split the question into facets, search, curate what is useful, refine, finish.",
        "Rules:",
        *(f"- {words}" for words, on in rules.items() if on),
    ]


def _evidence(env: Env) -> dict[str, bool]:
    told = {NAMED: env.has("entity_handles"), RANKED: env.ranks, LEADS: env.leads_on}
    return {**told, LEAD_HANDLES: env.leads_have_handles}


SENTENCES = msgspec.toml.decode(
    resources.files(__package__).joinpath("sentences.toml").read_bytes(), type=dict[str, str]
)


def sentence(note: Note) -> str:
    """Put a note into words."""

    def write(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return ", ".join(" ".join(str(part).split()) for part in value)
        return " ".join(value.split()) if isinstance(value, str) else value

    return SENTENCES[note.code].format(**{name: write(value) for name, value in note.data.items()})
