"""Requests of tools to the world outside the pure core, and the answers: the only way to retriever and verifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness1.records import DocId, Hit, Observation, Ranking, Record, UnitId, Verdict

SAID, FAILED = "answered", "tool_error"
"""Codes of the notes that hold what a text tool returned, and what it raised as a `ToolError`."""


class SearchFor(Record):
    """Run these queries concurrently, `k` hits each, without the chunks that are already stored."""

    queries: tuple[str, ...]
    k: int
    about: str = ""
    """A text that the embeddings of the results are compared with; empty: none."""


class GrepFor(Record):
    """Find at most `limit` chunks, in corpus order, whose text matches an RE2 pattern."""

    pattern: str
    limit: int


class ReadDocument(Record):
    """All chunks of one document, in order."""

    doc_id: DocId


class Judge(Record):
    """Judge a claim against the text of each unit."""

    claim: str
    texts: tuple[tuple[UnitId, str], ...]


class Consult(Record):
    """Call a function that returns a text, of which at most `characters` are kept."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    characters: int


Request = SearchFor | GrepFor | ReadDocument | Judge | Consult


class Answer(Record):
    """The answer to a request: hits (each chunk once), one ranking for each query, verdicts, the fault of a pattern, or
    a text or why there is none."""

    hits: tuple[Hit, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    bad_pattern: str | None = None
    unshown: int = 0
    """Parts of a document for which a recorded observation had no room."""
    text: str = ""
    refused: str | None = None


def recorded_answer(observation: Observation) -> Answer:
    """Return the answer that an observation was made from; replay gives it to the pure core in place of the world."""
    reasons = {observation.error.code: observation.error.data.get("reason")} if observation.error else {}
    fresh = tuple(verdict for verdict in observation.verdicts if not verdict.cached)
    unshown = sum(note.data["parts"] for note in observation.notes if note.code == "continues")
    text = "".join(note.data["text"] for note in observation.notes if note.code == SAID)
    bad, refused = reasons.get("bad_pattern"), reasons.get(FAILED)
    return Answer(observation.hits, observation.rankings, fresh, bad, unshown, text, refused)
