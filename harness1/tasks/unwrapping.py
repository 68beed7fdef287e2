"""Lines of a paragraph, which many files break at a width, put together again."""

from __future__ import annotations

import re
from collections.abc import Iterator

WIDE = 55
"""Characters of a line that may have been broken because the next word had no room."""
_ENDS = (".", "!", "?", ":", ";", ".)", ".”", '."')
_TABLE = re.compile(r"\||\t| {3,}|\.{4,}|`{3}")
_APART = re.compile(rf"[-*•·#>=~+]|\d+[.)] |\(?[a-z]\) |\.\. |.*(?:{_TABLE.pattern})")
"""A line of a list, a table or code, or a heading."""


def unwrapped(text: str) -> str:
    """Return a text with the lines of each paragraph joined: sentences would end at their borders. Lines of lists,
    tables, code and headings stay apart."""
    return "\n".join(_joined(text.splitlines()))


def _joined(lines: list[str]) -> Iterator[str]:
    whole, last = "", ""
    for line in lines:
        if whole and _continues(last, line):
            whole += " " + line.strip()
        else:
            if whole:
                yield whole
            whole = line.strip()
        last = line
    yield whole


def _continues(last: str, line: str) -> bool:
    """Return whether a line goes on with the sentence of the last one."""
    bare, following = last.strip(), line.strip()
    if not bare or not following or bare.endswith(_ENDS) or _APART.match(following) or _TABLE.search(bare):
        return False
    return following[0].islower() or bare.endswith(",") or len(bare) >= WIDE
