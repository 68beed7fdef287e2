"""A substring that every match of a pattern holds, by which an engine narrows a regular expression down."""

from __future__ import annotations

import re

SPECIAL = frozenset("\\%_\"'")
"""Characters that mean something in the filters of some engine; a literal goes without them."""
_TOKEN = re.compile(
    r"""
      (?P<refused>\(\?(?!:)|\{(?!\d+(?:,\d*)?\}))       # flags and names; what may be a repeat elsewhere
    | (?P<open>\((?:\?:)?) | (?P<close>\)) | (?P<either>\|)
    | (?P<repeat>[*+?]|\{\d+(?:,\d*)?\})
    | (?P<gap>[.^$]|\\[bBdDsSwWAzafnrtv]|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\])
    | \\(?P<quoted>[^0-9A-Za-z])
    | (?P<unknown>[\\\[])                               # \Q, \x, \p and the like
    | (?P<plain>.)
    """,
    re.VERBOSE | re.DOTALL,
)


def required_literal(pattern: str) -> str:
    """The longest run of plain characters outside groups without which a valid RE2 pattern matches no text, or "".

    It errs on the side of "": flags, alternatives outside groups and rare escapes give none, what stands in a group
    is not looked at, and a run ends before a character that is repeated.
    """
    runs, run, depth = [""], "", 0
    for token in _TOKEN.finditer(pattern):
        kind = token.lastgroup
        if kind in ("refused", "unknown") or (kind == "either" and depth == 0):
            return ""
        depth += (kind == "open") - (kind == "close")
        character = token["quoted"] or token["plain"] or ""
        if character and depth == 0 and character.isprintable() and character not in SPECIAL:
            run += character
            continue
        runs.append(run[:-1] if kind == "repeat" else run)
        run = ""
    return max([*runs, run], key=len)
