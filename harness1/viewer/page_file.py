"""One document with the scripts and styles of `page/`, and its data in tags that are not executed."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from harness1.viewer.html import asset, render

LEVEL = 9
STYLES = ("style.css", "parts.css", "print.css")
SCRIPTS = (
    "dom.js",
    "data.js",
    "route.js",
    "fold.js",
    "documents.js",
    "list.js",
    "runs.js",
    "pairs.js",
    "context.js",
    "result.js",
    "memory.js",
    "chain.js",
    "reward.js",
    "strip.js",
    "delivered.js",
    "episode.js",
    "beside.js",
    "curves.js",
    "training.js",
    "session.js",
    "recipe.js",
    "keys.js",
    "live.js",
    "main.js",
)
"""Scripts in the order of their imports."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.M)
_EXPORT = re.compile(r"^export ", re.M)


def deflated(value: Any) -> str:
    """Return JSON as a raw deflate stream (RFC 1951) in base64, which `DecompressionStream("deflate-raw")` inflates."""
    squeeze = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(squeeze.compress(msgspec.json.encode(value)) + squeeze.flush()).decode("ascii")


def inflated(text: str) -> Any:
    """Undo `deflated`."""
    return msgspec.json.decode(zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS))


def script() -> str:
    """Return all modules as one script without imports, which need a server; names are unique across modules."""
    bodies = (_EXPORT.sub("", _IMPORT.sub("", asset(name))) for name in SCRIPTS)
    return '"use strict";\n(() => {\n' + "\n".join(bodies) + "})();\n"


def page(title: str, index: Any, tags: Iterable[tuple[str, str]] = (), live: bool = False) -> Iterator[str]:
    """Yield the document in pieces; `tags` are the names and contents of its data. A `live` page may ask its server."""
    return render("page.html", title=title, styles=STYLES, index=index, script=script(), tags=tags, live=live)
