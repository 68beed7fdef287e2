"""The commands and blocks of code in the README and the guides, as a reader sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results.md"
"""A record of what was measured, not a guide: its commands are those of their time."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").glob("*.md")} - {RESULTS})]
_LIST = re.compile(r"\s*([-*|]|\d+\.)\s")


class Block(NamedTuple):
    """A block of a page: its language, "" for an indented one, and its lines."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced and the indented blocks of a page; an indented line that continues a list is none."""
    name, found, language, begun = str(page.relative_to(ROOT)), [], None, 0
    before = ""
    for number, line in enumerate([*page.read_text().splitlines(), ""], start=1):
        if line.startswith("```"):
            if language is None:
                language, found, begun = line[3:], [], number + 1
            else:
                yield Block(name, begun, language, tuple(found))
                language, found = None, []
        elif language is not None:
            found.append(line)
        elif line.startswith("    ") and (found or (not before and not _LIST.match(line))):
            begun = begun if found else number
            found.append(line[4:])
        elif found:
            yield Block(name, begun, "", tuple(found))
            found = []
        before = line


def commands(block: Block) -> Iterator[str]:
    """Yield the commands of a block: continued lines joined, comments and what a shell ignores left out."""
    joined = "\n".join(re.sub(r"(^|\s)#.*$", "", line).rstrip() for line in block.lines)
    for line in joined.replace("\\\n", " ").splitlines():
        yield from (" ".join(part.split()) for part in line.split("&&") if part.strip())


def shell(page: Path) -> Iterator[str]:
    for block in blocks(page):
        if block.language in ("", "bash", "sh"):
            yield from commands(block)
