"""Output: lines and JSON, in which no character acts on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.plain import printable

if TYPE_CHECKING:
    from harness1.data.leaks import Selection


def program() -> str:
    """Return how this program is called: by its name, or by its path if the shell would not find it by the name."""
    called = sys.argv[0]
    if Path(called).name != "harness1" or which("harness1") == which(called):
        return "harness1"
    return called


def put(text: str, *, end: str = "\n", flush: bool = False) -> None:
    """Print a text on standard output."""
    print(printable(text), end=end, flush=flush)


def say(line: str) -> None:
    """Print a line about the work on standard error, with the name of the program."""
    print(printable(f"harness1: {line}").replace("\n", "\\u000a"), file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    put(msgspec.json.encode(value).decode())


def print_result(found: Any, as_json: bool, in_words: Callable[..., None], *more: Any) -> None:
    """Print a result as one JSON object, or else by `in_words`, which takes the result and `more`."""
    if as_json:
        print_json(found)
    else:
        in_words(found, *more)


def say_torn(run: Path, size: int) -> None:
    """Tell the user that the last line of a record, torn by a crash, was dropped."""
    if size:
        say(f"{run}: a torn last line ({size} bytes) was dropped")


def say_left_out(*selections: Selection) -> None:
    """Tell the user which tasks of each split are not learned from, and why."""
    for selection in selections:
        if selection.line:
            say(selection.line)
