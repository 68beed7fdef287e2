"""Conversion of a policy's output to plain JSON: the result can always be stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from harness1.records import ToolCall

DEEPEST = 16
"""Levels of nesting that are kept; no tool has arguments of more than two."""


def json_safe_call(call: ToolCall) -> ToolCall:
    """Return the call with plain arguments; arguments that are not a mapping are put under the name `arguments`."""
    arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
    return ToolCall(utf8_safe(str(call.name)), json_safe(arguments))


def json_safe(value: Any, depth: int = 0) -> Any:
    """Convert a value to plain JSON: text without lone surrogates, finite numbers, text keys, limited nesting.

    Anything else is replaced by the name of its type.
    """
    match value:
        case None | bool():
            return value
        case str():
            return utf8_safe(value)
        case int() if abs(value) < 2**63:
            return value
        case float() if math.isfinite(value):
            return value
        case dict() if depth < DEEPEST:
            return {utf8_safe(str(key)): json_safe(item, depth + 1) for key, item in value.items()}
        case list() | tuple() if depth < DEEPEST:
            return [json_safe(item, depth + 1) for item in value]
        case _:
            return f"<{type(value).__name__}>"


def utf8_safe(text: str) -> str:
    """Replace each lone surrogate, which UTF-8 cannot encode, with a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def meant(name: str, names: Iterable[str]) -> str:
    """Return the question whether the most similar of some names was meant; an empty string if none is similar."""
    near = get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless there is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
