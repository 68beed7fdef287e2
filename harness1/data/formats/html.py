"""Extracts the readable text of an HTML page, with the parser of the standard library."""

from __future__ import annotations

import re
from html.parser import HTMLParser

HIDDEN = frozenset({"script", "style"})
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "details", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr",
    "li", "main", "nav", "ol", "option", "p", "pre", "section", "summary", "table", "tbody", "td", "tfoot",
    "th", "thead", "tr", "ul",
})  # fmt: skip


def read_html(page: str) -> tuple[str, str]:
    """Return the title of a page ("" if it has none) and its text: one line for each block, without scripts and
    styles."""
    parser = _Reader()
    parser.feed(page)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.text).split("\n"))
    return " ".join("".join(parser.title).split()), "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.text: list[str] = []
        self._hidden = self._verbatim = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HIDDEN:
            self._hidden += 1
        elif tag == "title":
            # Drawings have titles too: the page's own is the first.
            self._in_title = not self.title
        elif tag in BLOCKS:
            self._verbatim += tag == "pre"
            self.text.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        elif tag == "title":
            self._in_title = False
        elif tag in BLOCKS:
            self._verbatim = max(0, self._verbatim - (tag == "pre"))
            self.text.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._hidden:
            self.text.append(data if self._verbatim else re.sub(r"\s+", " ", data))
