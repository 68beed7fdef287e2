"""The tool that finds documents by a regular expression."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation
from harness1.tools.discovery import discover
from harness1.tools.requests import GrepFor
from harness1.tools.tool import Steps, Traits

Pattern = Annotated[
    str, Meta(description="An RE2 regular expression, e.g. (?i)kelvin.{0,20}1892; no lookaround.", max_length=1000)
]
REASON_CHARACTERS = 1200
"""Characters of an engine's reason for refusing a pattern, which may repeat the pattern."""


@Traits("pattern", discovers=True)
def grep_corpus(memory: WorkingMemory, env: Env, pattern: Pattern) -> Steps:
    """Find documents by a regular expression: for exact names, numbers, dates and quotations."""
    if not pattern.strip():
        return Observation("grep_corpus", error=Note("empty_pattern"))
    answer = yield GrepFor(pattern, env.grep.hits)
    if answer.bad_pattern is not None:
        return Observation("grep_corpus", error=Note("bad_pattern", {"reason": answer.bad_pattern[:REASON_CHARACTERS]}))
    return discover(grep_corpus, memory, env, answer, seed=False)
