"""The templates that make all HTML and escape every value, and the one document with its scripts and data."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from harness1.plain import printable as escaped

if TYPE_CHECKING:
    from jinja2 import Environment


THREE_DECIMALS = re.compile(r"recall|precision|_f[12]|@\d|^AP$|^RR$|selection_loss|reward|merge_ratio")


def render(name: str, /, **values: Any) -> Iterator[str]:
    """Yield a page of `templates/` in pieces, because memory may not hold a large one."""
    return environment().get_template(name).generate(values)


def asset(name: str) -> str:
    """Return a style sheet or a script of `page/`."""
    return (files("harness1.viewer") / "page" / name).read_text(encoding="utf-8")


def printable(value: Any) -> Any:
    """Replace the control characters of a text, also those for the direction of writing, by spaces; leave all else."""
    if not isinstance(value, str) or hasattr(value, "__html__") or value.isprintable():
        return value
    return "".join(sign if sign.isprintable() else " " for sign in value)


def format_value(value: Any) -> str:
    """Format a value of a card or a setting."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:,.6g}"
        case list() | tuple():
            return ", ".join(map(format_value, value)) or "none"
        case dict():
            return ", ".join(f"{name} {format_value(each)}" for name, each in value.items()) or "none"
        case _:
            return str(value) or "empty"


def amount(value: float | None, metric: str) -> str:
    """Format a value of a metric."""
    if value is None:
        return "–"
    if THREE_DECIMALS.search(metric):
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


@cache
def environment() -> Environment:
    """Return the environment of all templates. Jinja is imported for the first page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("harness1.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["asset"] = asset
    made.filters |= {"shown": format_value, "amount": amount, "address": lambda text: quote(text, safe="")}
    made.policies["json.dumps_function"] = lambda value: escaped(msgspec.json.encode(value).decode())
    made.policies["json.dumps_kwargs"] = {}
    return made


LEVEL = 9
STYLES = ("style.css", "parts.css", "print.css")
_MODULES = (
    "dom data route fold documents list runs pairs context result memory chain reward strip delivered answer episode"
    " beside curves training session recipe keys live main"
)
SCRIPTS = tuple(f"{name}.js" for name in _MODULES.split())  # scripts in the order of their imports
_IMPORT = re.compile(r"^import [^;]*;\n", re.M)
_EXPORT = re.compile(r"^export ", re.M)


def deflate(value: Any) -> str:
    """Return JSON as a raw deflate stream (RFC 1951) in base64, which `DecompressionStream("deflate-raw")` inflates."""
    squeeze = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(squeeze.compress(msgspec.json.encode(value)) + squeeze.flush()).decode("ascii")


def script() -> str:
    """Return all modules as one script without imports, which need a server; names are unique across modules."""
    bodies = (_EXPORT.sub("", _IMPORT.sub("", asset(name))) for name in SCRIPTS)
    return '"use strict";\n(() => {\n' + "\n".join(bodies) + "})();\n"


def page(title: str, index: Any, tags: Iterable[tuple[str, str]] = (), live: bool = False) -> Iterator[str]:
    """Yield the document in pieces; `tags` are the names and contents of its data. A `live` page may ask its server."""
    return render("page.html", title=title, styles=STYLES, index=index, script=script(), tags=tags, live=live)
