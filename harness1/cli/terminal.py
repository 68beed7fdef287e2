"""The terminal: the one place where tables, panels and bars are written."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness1.redaction import printable


class Terminal(Console):
    """A console for text from outside: no string is read as markup, and only styles of our own reach the terminal."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, quiet=quiet, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the parts of what is shown, each printable unless it moves the cursor of a live view."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(printable(part.text), part.style)
