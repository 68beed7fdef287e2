"""Extracts the readable text of an HTML page, as a browser parses it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from selectolax.lexbor import LexborHTMLParser

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

TEXT = "-text"
HIDDEN = frozenset({"script", "style", "iframe", "noembed", "noframes"})
"""Elements without text of the page. A browser keeps the tags in the last three as plain characters, and shows none."""
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "details", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr",
    "li", "main", "nav", "ol", "option", "p", "pre", "section", "summary", "table", "tbody", "td", "tfoot",
    "th", "thead", "tr", "ul",
})  # fmt: skip


def read_html(page: str) -> tuple[str, str]:
    """Return the title of a page ("" if it has none) and its text: one line for each block, without scripts and
    styles. The time may grow with the square of the depth of a page, which only hostile ones make large."""
    reader = _Reader()
    node: LexborNode | None = LexborHTMLParser(page).root
    while node is not None:
        inside = node.first_child if reader.enter(node) else None
        while inside is None and node is not None:
            reader.leave(node)
            inside, node = node.next, node.parent
        node = inside
    lines = (" ".join(line.split()) for line in "".join(reader.text).split("\n"))
    return " ".join("".join(reader.title).split()), "\n".join(line for line in lines if line)


class _Reader:
    """What was read of a page, whose nodes are entered and left in the order of its text."""

    def __init__(self) -> None:
        self.title: list[str] = []
        self.text: list[str] = []
        self._verbatim = 0
        self._in_title = False

    def enter(self, node: LexborNode) -> bool:
        """Read a node; return False if what is inside it is no text of the page."""
        tag = node.tag
        if tag == TEXT:
            text = node.text_content or ""
            if self._in_title:
                self.title.append(text)
            else:
                self.text.append(text if self._verbatim else re.sub(r"\s+", " ", text))
        elif tag == "title":
            # Drawings have titles too: the page's own is the first.
            self._in_title = not self.title
        self._at_border(tag, 1)
        return tag not in HIDDEN

    def leave(self, node: LexborNode) -> None:
        """End the element that was entered."""
        if node.tag == "title":
            self._in_title = False
        self._at_border(node.tag, -1)

    def _at_border(self, tag: str | None, step: int) -> None:
        if tag in BLOCKS:
            self.text.append("\n")
            self._verbatim += step * (tag == "pre")
