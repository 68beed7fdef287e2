"""Find the session of a call; a session becomes the episode of the rows made of its calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from harness1.hashing import text_digest

HEADERS = ("x-session-id", "x-harness-session")
QUERY = "session"
PLACEHOLDERS = re.compile(
    r"\W*|[x*.]+|(sk-)?(1234|anything|changeme|dummy|empty|fake|key|local|none?|null|placeholder|secret|test|token|unused)"
    r"|na|(your|my|no|sk-no)?[-_]?(api)?[-_]?key([-_]?(here|required))?|not[-_](needed|used|required|set)",
    re.IGNORECASE,
)
"""Placeholder keys, which people write where a client insists on a key."""
_WORD = r"([A-Z]?[a-z]{1,11}|[A-Z]{1,12}|([A-Z]?[a-z]{1,6}|[A-Z]{1,6})\d{1,4}|\d{1,6})"
NAMES = re.compile(rf"(?=.{{1,40}}$)(?!sk[-_]){_WORD}([-_.]{_WORD})*", re.ASCII)
"""Keys that are plainly names, as `episode-17` and `run_3.task-12`: at most 40 characters, words of at most 12 letters
in one case (the first may be a capital) and numbers of at most 6 digits, between hyphens, underscores and full stops; a
word may end with a number, of at most 10 characters together. A key that begins with `sk-` is not a name."""
LONGEST_NAME = 128
_UNFIT = re.compile(r"[^\w.:@/+=-]", re.ASCII)


def session_of(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """Return the session that a request names in a header, its query or its key; None if it does not name one.

    A key that is not plainly a name (`NAMES`) may be a real one, which must not be recorded, so its digest is used.

    Args:
        headers: by names in lower case.
    """
    named = [headers.get(name, "") for name in HEADERS] + [query.get(QUERY, "")]
    if found := next((name.strip() for name in named if name.strip()), None):
        return clean_name(found)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get("x-api-key", "").strip()
    if not key or PLACEHOLDERS.fullmatch(key):
        return None
    return key if NAMES.fullmatch(key) else f"key-{text_digest(key)}"


def clean_name(name: str) -> str:
    """Return a name with plain characters and bounded length; a digest distinguishes names that had to change."""
    plain = _UNFIT.sub("_", name)[:LONGEST_NAME]
    return plain if plain == name else f"{plain[:96]}~{text_digest(name)}"


def fresh_session() -> str:
    """Return a name for a session without one."""
    return f"anonymous-{secrets.token_hex(8)}"
