"""What a judge found in well-paid episodes."""

from __future__ import annotations

from harness1.records import Record


class Finding(Record):
    """A trick that a judge has shown."""

    run: str
    task_id: str
    sample_idx: int
    reward: float
    kind: str
    turn: int | None
    quote: str


class RedTeamReport(Record, kw_only=True):
    """The content of `judge.json`. Episodes are honest, tricks, invalid (a reply that says nothing that can be checked)
    or missing (no reply: the same command asks again)."""

    judge: str
    prompt: str
    """The hash of the judge's system message."""
    episodes: int
    honest: int
    tricks: int
    invalid: int
    missing: int
    kinds: dict[str, int]
    """The number of tricks of each kind."""
    prompt_tokens: int
    """As the judge's server counts them, of all replies; those of a server that does not count are missing."""
    output_tokens: int
    findings: tuple[Finding, ...] = ()
    faults: tuple[str, ...] = ()
    """The first reasons why replies are missing."""
