"""Drafts of tasks, before other documents that answer are looked for."""

from __future__ import annotations

from harness1.records import Record

SINGLE, BRIDGE, COMPARISON, INTERSECTION, CLAIM, ASPECT = KINDS = (
    *("single", "bridge", "comparison", "intersection", "claim", "aspect"),
)


class Need(Record):
    """A piece of evidence: a passage, and the names that another document has to hold in one sentence to serve as well.
    Without names, it has to say nearly the same as `quoted`."""

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
