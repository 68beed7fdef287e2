"""The page that a viewer file is: one document of the parts in `page/`."""

from __future__ import annotations

import base64
import re
import zlib
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

LEVEL = 9


def packed(value: Any) -> str:
    """JSON as a raw deflate stream (RFC 1951) in base64: what `DecompressionStream("deflate-raw")` inflates."""
    squeeze = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(squeeze.compress(msgspec.json.encode(value)) + squeeze.flush()).decode("ascii")


def unpacked(text: str) -> Any:
    """The opposite of `packed`."""
    return msgspec.json.decode(zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS))


def inline_json(value: Any) -> str:
    """JSON in which no character can begin or end a tag or a comment of HTML."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def inert(name: str, content: str) -> str:
    """A script tag that nothing executes."""
    return f'<script type="text/plain" id="{name}">{content}</script>\n'


STYLES = ("style.css", "parts.css", "print.css")
SCRIPTS = (
    "dom.js",
    "data.js",
    "route.js",
    "documents.js",
    "list.js",
    "runs.js",
    "context.js",
    "result.js",
    "memory.js",
    "graph.js",
    "reward.js",
    "strip.js",
    "episode.js",
    "beside.js",
    "curves.js",
    "training.js",
    "keys.js",
    "main.js",
)
"""Each file after those that it imports from."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.M)
_EXPORT = re.compile(r"^export ", re.M)


def part(name: str) -> str:
    """A file of the page."""
    return (files("harness1.viewer") / "page" / name).read_text(encoding="utf-8")


def script() -> str:
    """All modules as one script: a file without a server cannot import, so that imports are taken out, and names are
    unique across modules."""
    bodies = (_EXPORT.sub("", _IMPORT.sub("", part(name))) for name in SCRIPTS)
    return '"use strict";\n(() => {\n' + "\n".join(bodies) + "})();\n"


def page(title: str, index: Any) -> tuple[str, str]:
    """The document without its data, in two parts: what stands before the data, and what closes it. The index and the
    script come first, so that the list can be used while the rest is being read."""
    content = {
        "/* style */": "\n".join(part(name) for name in STYLES),
        "/* index */": inline_json(index),
        "/* script */": script(),
        "<!-- title -->": escape(title),
    }
    head, tail = part("page.html").split("<!-- data -->")
    # Divided before anything is filled in: what is filled in may hold such a mark.
    pieces = re.split("(" + "|".join(map(re.escape, content)) + ")", head)
    return "".join(content.get(piece, piece) for piece in pieces), tail
