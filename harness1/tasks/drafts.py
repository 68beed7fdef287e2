"""Drafts of tasks, before other documents that answer are looked for."""

from __future__ import annotations

from harness1.records import Record

SINGLE, BRIDGE, COMPARISON, INTERSECTION, CLAIM, ASPECT = KINDS = (
    *("single", "bridge", "comparison", "intersection", "claim", "aspect"),
)
DESCRIPTION = "description"
"""The form that asks what a sentence describes."""


class Need(Record):
    """A piece of evidence: a passage, and what another document has to hold to serve as well: the names in one
    sentence, or, where a sentence is quoted, nearly the same sentence with these names."""

    passage: int
    names: tuple[str, ...] = ()
    quoted: str = ""


class Draft(Record, kw_only=True):
    """A question over passages, which are given by their places in the graph."""

    kind: str
    form: str
    """The way of asking within the kind."""
    question: str
    needs: tuple[Need, ...]
    """The evidence, in the order in which a reader finds it."""
    answer: str
    links: tuple[str, ...] = ()
    """The name by which each piece of evidence leads to the next."""
