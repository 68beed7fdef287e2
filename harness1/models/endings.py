"""When an answer has said all that is wanted, so that its server need not write on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from harness1.models.dialects import read_calls, text_of
from harness1.tools.tool import ToolSpec

BLANKS = 32  # blanks at the end of a text that is no call: models that lose the thread write on with them alone
FAR = 8  # blanks behind a call that follows words
REPEATS, SHORTEST = 3, 32
"""What is written so many times, one after the other, and as many characters: the model goes round in a circle."""
_CLOSED = re.compile(r"(?:[})\]]|</[\w:.-]+>|```)\s*\Z")  # the ends of calls that are whole


def has_ended(message: dict[str, Any], specs: Sequence[ToolSpec]) -> bool:
    """Return True if nothing more of a message is wanted: it begins with a whole call, ends with one and blanks, or
    goes on with blanks or repetition. Weak models explain a call after it, which would make it no call."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    thoughts = (text_of(message.get(name)) for name in ("reasoning", "reasoning_content"))
    content = text_of(message.get("content"))
    written = "".join([*thoughts, content, *(f"{call['name']}{call['arguments']}" for call in calls)])
    if _is_circle(written) or (len(written) >= BLANKS and written[-BLANKS:].isspace()):
        return True
    if calls or not _CLOSED.search(content):
        return False
    reading = read_calls(content, specs, cut=True)
    # A call that follows words may be quoted from a document, so that more words may follow.
    return bool(reading.calls) and (not reading.words or content[-FAR:].isspace())


def _is_circle(text: str) -> bool:
    """Return True if the end of a text repeats itself, and is no rule or edge of a table."""
    before = text.rfind(text[-SHORTEST:], 0, len(text) - 1)
    if before < 0 or len(text) < SHORTEST:
        return False
    period = len(text) - SHORTEST - before
    return any(map(str.isalnum, text[-period:])) and text.endswith(text[-period:] * REPEATS)
