"""How files of each kind are read, by the ending of their name.

`FORMATS` is the one table; an installed package adds an ending in the group `harness1.readers`. A file of any other
kind is read as it stands if it holds text, and is not read if it does not.
"""

from __future__ import annotations

import csv
import email
import email.policy
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.message import EmailMessage, MIMEPart
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness1.data.contents import (
    BROKEN,
    TEXT_BYTES,
    Contents,
    NotText,
    Unreadable,
    decoded,
    is_binary,
    reason,
    table_text,
    whole,
)
from harness1.data.pages import OFFICE, join_hyphenated, read_docx, read_html, read_office, read_page, read_pdf
from harness1.errors import MALFORMED, UsageError
from harness1.plain import counted, utf8_safe
from harness1.plugins import find_plugin, open_added, plugin_names

Read = Callable[[bytes], Contents]


@dataclass(frozen=True)
class Format:
    """How a kind of files is read: by `read`, or as text, with a title that is found in it. `prose`: its words may
    be hyphenated over the end of a line. `most`: bytes of the largest file. `needs`: a module of the extra
    `documents`."""

    read: Read | None = None
    title: re.Pattern[str] | None = None
    prose: bool = False
    most: int = TEXT_BYTES
    needs: str = ""

    def check_size(self, data: bytes) -> None:
        """Raise Unreadable if a file is too large."""
        if len(data) > self.most:
            raise Unreadable(f"larger than {self.most:,} bytes")


def read_table(data: bytes) -> Contents:
    """Return a table, each row with the names of its header. Quotes that do not pair are inches, or words."""
    text, notice = decoded(data)
    first = re.sub('"[^"]*"', "", text.lstrip("\r\n").partition("\n")[0])
    between = "\t" if "\t" in first else max(",;|", key=first.count)
    former = csv.field_size_limit(TEXT_BYTES)  # of the whole process
    try:
        rows = [*csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)]
    except csv.Error:
        rows = [*csv.reader(io.StringIO(text, newline=""), delimiter=between, quoting=csv.QUOTE_NONE)]
    finally:
        csv.field_size_limit(former)
    return whole("", table_text(rows), notice)


def _parsed(text: str) -> Any:
    """Return the value in a text of JSON, whose numbers stay as they are written."""
    return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)


def _flat(value: Any, name: str = "") -> Iterator[str]:
    """Yield a line for each value within a JSON value, with the names that lead to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for each in value:
            yield from _flat(each, name)
    elif isinstance(value, list):
        yield from _flat(", ".join(map(str, value)) or None, name)
    elif value is not None:
        yield f"{name}: {value}" if name else str(value)


def read_json(data: bytes, *, lines: bool = False) -> Contents:
    """Return a JSON value, or one on each line, as a line for each value in it; what is none as it stands."""
    text, notice = decoded(data)
    try:
        values = map(_parsed, filter(str.strip, text.split("\n") if lines else [text]))
        shown = utf8_safe("\n\n".join("\n".join(_flat(value)) for value in values))
        return whole("", shown if len(shown) <= TEXT_BYTES else text, notice)
    except MALFORMED:
        return whole("", text, notice)


def _joined(value: Any) -> str:
    """Return a text of a notebook, which may be a list of lines."""
    return "".join(filter(lambda line: isinstance(line, str), value)) if isinstance(value, list) else str(value or "")


def read_notebook(data: bytes) -> Contents:
    """Return the cells of a notebook, with what they printed; before version 4, they are those of its worksheets."""
    json_text, notice = decoded(data)
    try:
        book, texts = _parsed(json_text), list[str]()
        for cell in chain.from_iterable(each["cells"] for each in book.get("worksheets") or [book]):
            texts.append(_joined(cell.get("source") or cell.get("input")))
            for each in cell.get("outputs") or ():
                shown = each.get("text") or (each.get("data") or {}).get("text/plain") or each.get("evalue")
                texts += [_joined(shown)] if shown else []
    except BROKEN as error:
        raise Unreadable(f"no notebook ({reason(error)})") from error
    text = utf8_safe("\n\n".join(texts))
    return whole(_title(MARKDOWN, text), text, notice)


_TAG = re.compile(
    r"<!\[CDATA\[(.*?)(?:\]\]>|\Z)|<!--.*?(?:-->|\Z)|</?(?:emphasis|strong|su[bp]|tspan)\b[^<>]*>|(<[^<>]*>)", re.DOTALL
)
_WORDED = re.compile(r"""\s(?:alt|description|label|summary|text|title)\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)


def read_xml(data: bytes) -> Contents:
    """Return the text between the tags of an XML file, and what they say themselves, as those of outlines do."""
    text, notice = decoded(data, declares=True)

    def lay_out(found: re.Match[str]) -> str:
        said = (first or second for first, second in _WORDED.findall(found[2] or ""))
        return "\n".join(["", *said, ""]) if found[2] else found[1] or ""

    lines = html.unescape(_TAG.sub(lay_out, text)).splitlines()
    return whole("", "\n".join(line for line in map(str.strip, lines) if line), notice)


HEADERS = ("From", "To", "Cc", "Date", "Subject")


def _parts(message: MIMEPart, is_choice: bool = False) -> Iterator[tuple[MIMEPart, bool]]:
    """Yield the parts of a message that hold no others, and whether others say the same."""
    if message.get_content_maintype() != "multipart":
        yield message, is_choice
    elif message.is_multipart():
        for part in message.iter_parts():
            yield from _parts(part, is_choice or message.get_content_subtype() == "alternative")


def _text_of(part: MIMEPart) -> tuple[str, str]:
    """Return the text of a part of a message, and a notice, as `decoded` does."""
    packed, notice = part.get_payload(decode=True), ""
    raw = packed if isinstance(packed, bytes) else b""
    try:
        text = raw.decode(part.get_content_charset() or "utf-8")
    except (LookupError, ValueError):
        text, notice = decoded(raw, declares=True)
    return read_html(text)[1] if part.get_content_subtype() == "html" else text, notice


def _message(data: bytes, anchor: str = "") -> Contents:
    """Return what a message holds: its plain parts, or its pages, and a section for each section of what is
    attached."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    lines = [utf8_safe(f"{name}: {message[name]}") for name in HEADERS if message[name]]
    attached, texts, notices = list[tuple[str, str]](), list[tuple[str, bool]](), list[str]()
    for part, is_choice in _parts(message):
        is_message = part.get_content_type() == "message/rfc822"
        name = utf8_safe(part.get_filename() or ("message.eml" if is_message else ""))
        if part.get_content_maintype() == "text" and (not name or part is message):
            text, notice = _text_of(part)
            texts += [(text, is_choice and part.get_content_subtype() != "plain")] if text.strip() else []
            notices += [notice] if notice else []
        elif name:
            lines.append(f"Attached: {name}")
            with suppress(Unreadable, UsageError, *BROKEN):
                packed: Any = part.get_content().as_bytes() if is_message else part.get_payload(decode=True)
                for at, each in read_file(Path(name).suffix.lower(), packed).sections:
                    attached.append(("&".join(filter(None, (anchor, f"attached={name}", at))), each))
    plain = [text for text, is_other in texts if not is_other] or [text for text, _ in texts[:1]]
    shown = "\n".join([*lines, "", *plain])
    return Contents(utf8_safe(str(message["Subject"] or "")), [(anchor, shown), *attached], _one_of(notices, "part"))


def _one_of(notices: Sequence[str], noun: str) -> str:
    """Return a notice for those of several things, which are named."""
    return f"{counted(len(notices), noun)}, the first: {notices[0]}" if notices else ""


def read_mailbox(data: bytes) -> Contents:
    """Return the messages of a mailbox, a section for each."""
    messages = re.split(rb"(?m)^From [^\n]*\d:\d\d[^\n]*(?:\n|\Z)", data)
    found = [_message(each, f"message={number}") for number, each in enumerate(messages[1:], start=1)]
    if not found:
        raise Unreadable("no mailbox: no line in it begins a message (From ADDRESS DATE)")
    notices = [each.notice for each in found if each.notice]
    return Contents("", [*chain.from_iterable(each.sections for each in found)], _one_of(notices, "message"))


MARKDOWN = re.compile(r"^#{1,6}[ \t]+([^ \t\n].*)$", re.MULTILINE)
UNDERLINED = re.compile(r"""^(?=.*[^\W_])(\S(?:.*\S)?)[ \t\r]*\n([=\-~^"'#*+.:_`])\2{2,}[ \t\r]*$""", re.MULTILINE)
_TEXT, _PAGE, _XML, _TABLE = Format(), Format(read_page), Format(read_xml), Format(read_table)
FORMATS: Mapping[str, Format] = MappingProxyType(
    dict.fromkeys((".txt", ".text"), Format(prose=True))
    | dict.fromkeys((".log", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf"), _TEXT)
    | dict.fromkeys((".md", ".markdown", ".mdx", ".qmd", ".rmd"), Format(title=MARKDOWN))
    | dict.fromkeys((".html", ".htm", ".xhtml"), _PAGE)
    | dict.fromkeys((".xml", ".svg", ".opml", ".fb2", ".rss", ".atom"), _XML)
    | dict.fromkeys((".csv", ".tsv"), _TABLE)
    | {ending: Format(partial(read_office, ending), most=256 << 20, needs="kreuzberg") for ending in OFFICE}
    | {
        ".adoc": Format(title=re.compile(r"^=[ \t]+(\S.*)$", re.MULTILINE)),
        ".docx": Format(read_docx, most=256 << 20, needs="mammoth"),
        ".eml": Format(_message, most=256 << 20),
        ".ipynb": Format(read_notebook, most=256 << 20),
        ".json": Format(read_json),
        ".jsonl": Format(partial(read_json, lines=True)),
        ".mbox": Format(read_mailbox, most=256 << 20),
        ".ndjson": Format(partial(read_json, lines=True)),
        ".org": Format(title=re.compile(r"^#\+title:[ \t]*(\S.*)$", re.MULTILINE | re.IGNORECASE)),
        ".pdf": Format(read_pdf, most=256 << 20),
        ".rst": Format(title=UNDERLINED),
        ".tex": Format(title=re.compile(r"\\title\{([^{}\n]+)\}")),
    }
)
"""Most of a large PDF, office document or message is pictures, so that one may be larger than its text."""


def format_of(ending: str) -> Format | None:
    """Return how files are read whose names end so; None if nothing is known of them, and text alone is read."""
    if ending in FORMATS:
        return FORMATS[ending]
    if ending in plugin_names("readers"):
        return Format(partial(_read_added, ending), most=256 << 20)
    return None


def missing(form: Format) -> bool:
    """Return whether files of a kind need a package that is not installed."""
    return bool(form.needs) and find_spec(form.needs) is None


def read_text(form: Format, data: bytes) -> Contents:
    """Return what a text holds, whatever its encoding."""
    text, notice = decoded(data)
    shown = join_hyphenated([text])[0] if form.prose else text
    return whole(_title(form.title, text), shown, notice)


def read_file(ending: str, data: bytes) -> Contents:
    """Return what a file holds whose name ends so. Raises Unreadable: it is broken; UsageError: what reads it is
    absent."""
    form = format_of(ending) or _TEXT
    form.check_size(data)
    if form is _TEXT and ending not in FORMATS and is_binary(data):
        raise NotText
    try:
        found = form.read(data) if form.read else read_text(form, data)
    except BROKEN as error:
        raise Unreadable(f"broken ({reason(error)})") from error
    if len(found.title) + sum(len(anchor) + len(text) for anchor, text in found.sections) > TEXT_BYTES:
        raise Unreadable(f"its text has more than {TEXT_BYTES:,} characters")
    return found


def _title(pattern: re.Pattern[str] | None, text: str) -> str:
    if pattern is None or not (found := pattern.search(text)):
        return ""
    title = found[1].strip()
    return (title.rstrip("#").rstrip(" \t") or title[0]) if pattern is MARKDOWN else title


def _read_added(ending: str, data: bytes) -> Contents:
    title, text = open_added("readers", ending, find_plugin("readers", ending, FORMATS), data)
    return whole(utf8_safe(str(title)), utf8_safe(str(text)))
