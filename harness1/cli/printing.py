"""What verbs print at their end, as JSON or in words, and a note that several of them give."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(msgspec.json.encode(value).decode())


def print_result(found: Any, as_json: bool, in_words: Callable[..., None], *more: Any) -> None:
    """Print a result as one JSON object, or else by `in_words`, which takes the result and `more`."""
    if as_json:
        print_json(found)
    else:
        in_words(found, *more)


def say_torn(run: Path, size: int) -> None:
    """Tell the user that the last line of a record, which a crash had torn, was dropped."""
    if size:
        print(f"harness1: {run}: a torn last line ({size} bytes) was dropped", file=sys.stderr)
