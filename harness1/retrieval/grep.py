"""Regular expressions over all texts, by RE2: linear time whatever the pattern."""

from __future__ import annotations

import time
from collections.abc import Iterable

import re2

from harness1.retrieval.retriever import BadPattern, RetrievalFault

LONGEST_PATTERN = 1000
"""Characters."""
MEMORY = 4 << 20
"""Bytes that one compiled pattern may take; when matching needs more, RE2 gets slower, not bigger."""


def grep(
    texts: Iterable[bytes | memoryview], pattern: str, limit: int, deadline: float
) -> list[int] | BadPattern | RetrievalFault:
    """Positions of the first `limit` texts, in their order, that hold a match of an RE2 pattern.

    Args:
        texts: UTF-8. `^` and `$` stand for the ends of a whole text; `(?m)` makes them those of a line.
        deadline: seconds from now. Past it, what was found is not given out: the texts that were not looked at would
            pass for texts without a match.
    """
    compiled = compile_pattern(pattern)
    if isinstance(compiled, BadPattern):
        return compiled
    end = time.monotonic() + deadline
    found: list[int] = []
    numbered = enumerate(texts)
    while len(found) < limit and (item := next(numbered, None)):
        if time.monotonic() > end:
            return RetrievalFault(message="deadline")
        if compiled.search(item[1]):
            found.append(item[0])
    return found


def compile_pattern(pattern: str) -> re2._Regexp | BadPattern:
    """A compiled pattern, or what is wrong with it in a few words."""
    if len(pattern) > LONGEST_PATTERN:
        return BadPattern(reason=f"longer than {LONGEST_PATTERN} characters")
    options = re2.Options()
    options.max_mem = MEMORY
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else "invalid"
        return BadPattern(reason=reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason))
    except UnicodeEncodeError:
        return BadPattern(reason="not valid Unicode")
