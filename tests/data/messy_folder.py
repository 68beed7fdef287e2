"""Makes a folder as people keep it: the files of `messy_folder.toml` in 38 kinds, nine languages and twelve encodings,
each of which alone answers its questions, among others made by chance of sentences on the same subjects."""

from __future__ import annotations

import json
import random
import string
import tomllib
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from email.parser import HeaderParser
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from harness1.records import DocId, Gold, Task
from tests.data.office_files import docx, epub, ods, odt, paragraph, pdf, pptx, rtf, xlsx

PLAN = Path(__file__).with_suffix(".toml")
PAGE, CELL = "\n===\n", " | "
UNREAD = (".heic", ".zip", ".bin")


def write_folder(folder: Path, around: int, draw: int) -> list[Task]:
    """Write the files, `around` others that `draw` decides, and a few that hold no text; return the questions, each
    with its file as gold."""
    plan = tomllib.loads(PLAN.read_text(encoding="utf-8"))
    tasks = list[Task]()
    for each in plan["file"]:
        path, encoding = folder / each["path"], each.get("encoding", "utf-8")
        _write(path, _packed(path.suffix, path.stem, each["text"].lstrip("\n"), encoding))
        gold = Gold(relevant={DocId(each["path"]): 1})
        tasks += [Task(f"q{len(tasks) + at}", asked, gold=gold) for at, asked in enumerate(each["questions"], start=1)]
    rng, slots = random.Random(draw), plan["around"].pop("slots")
    languages = ["en", "en", *plan["around"]]
    for number in range(around):
        language = rng.choice(languages)
        _write_other(folder / language, number, plan["around"][language], slots, rng)
    for number, ending in enumerate(UNREAD):
        _write(folder / f"photos/IMG_{number}{ending}", bytes(rng.randrange(256) for _ in range(4000)) + b"\0")
    return tasks


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _packed(ending: str, title: str, text: str, encoding: str) -> bytes:
    """Return the bytes of a file with a text: packed, if its kind is, else the text as it stands."""
    pages = [page.strip("\n") for page in text.split(PAGE)]
    if ending in MAIL:
        return MAIL[ending](pages, encoding)
    return PACKED[ending](title, pages) if ending in PACKED else _encoded(text, encoding)


def _encoded(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode()


def _lines(pages: Sequence[str]) -> list[str]:
    return [escape(line, quote=False) for page in pages for line in page.splitlines() if line]


def _docx(_: str, pages: Sequence[str]) -> bytes:
    body = ""
    for line in _lines(pages):
        cells = "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in line.split(CELL))
        body += f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>" if CELL in line else paragraph(line)
    return docx(body.replace("</w:tbl><w:tbl>", ""))


def _sheets(write: Callable[..., bytes], _: str, pages: Sequence[str]) -> bytes:
    tables = ([line.split(CELL) for line in _lines([page])] for page in pages)
    return write(**{name: rows for ((name,), *rows) in tables})


def _notebook(_: str, pages: Sequence[str]) -> bytes:
    """A cell for each paragraph; one that begins with `>>>` is what the cell before it printed."""
    cells = list[dict[str, Any]]()
    for text in "\n".join(pages).split("\n\n"):
        if text.startswith(">>>"):
            cells[-1] |= {"cell_type": "code", "outputs": [{"output_type": "stream", "text": [text[4:]]}]}
        else:
            cells.append({"cell_type": "markdown", "source": text.splitlines(keepends=True)})
    return json.dumps({"cells": cells, "nbformat": 4}).encode()


def _message(text: str, encoding: str) -> bytes:
    given, message = HeaderParser().parsestr(text), EmailMessage()
    for name, value in given.items():
        message[name] = value
    body = str(given.get_payload())
    message.set_content(body, charset=encoding if _encoded(body, encoding) != body.encode() else "utf-8")
    return message.as_bytes()


def _mailbox(pages: Sequence[str], encoding: str) -> bytes:
    return b"\n".join(b"From x Mon Sep  2 10:00:00 2024\n" + _message(page, encoding) for page in pages)


PACKED: dict[str, Callable[[str, Sequence[str]], bytes]] = {
    ".docx": _docx,
    ".epub": lambda title, pages: epub("</p><p>".join(_lines(pages)), escape(title)),
    ".ipynb": _notebook,
    ".ods": partial(_sheets, ods),
    ".odt": lambda _, pages: odt(*_lines(pages)),
    ".pdf": lambda _, pages: pdf(*(page.splitlines() for page in pages)),
    ".pptx": lambda _, pages: pptx(*(_lines([page]) for page in pages)),
    ".rtf": lambda _, pages: rtf(*(line for page in pages for line in page.splitlines() if line)),
    ".xlsx": partial(_sheets, xlsx),
}
MAIL: dict[str, Callable[[Sequence[str], str], bytes]] = {
    ".eml": lambda pages, encoding: _message(pages[0], encoding),
    ".mbox": _mailbox,
}
TABLES = {".csv": ";", ".tsv": "\t", ".xlsx": CELL, ".ods": CELL}
COMMENTS = {".c": "// ", ".cs": "// ", ".py": "# ", ".sh": "# ", ".sql": "-- ", ".ts": "// "}
OTHERS = (
    *(".txt", ".txt", ".md", ".rst", ".log", ".html", ".xml", ".json", ".jsonl", ".yaml", ".org", ".tex", ".eml"),
    *(".docx", ".epub", ".ipynb", ".odt", ".pdf", ".pptx", ".rtf", *TABLES, *COMMENTS),
)
NARROW = (".txt", ".md", ".log", ".csv", ".eml")
"""Kinds that are still written in old encodings."""


def _write_other(folder: Path, number: int, language: dict[str, Any], slots: dict[str, list[str]], rng: Any) -> None:
    """Write a file of a few sentences of a language, of any kind."""
    ending, title = rng.choice(OTHERS), f"{rng.choice(language['words'])} {number}"
    sentences = [_filled(each, slots, rng) for each in rng.sample(language["sentences"], rng.randint(3, 4))]
    encoding = rng.choice(language["encodings"]) if ending in NARROW else "utf-8"
    if ending == ".eml" and encoding.startswith("utf-16"):
        encoding = "utf-8"  # which no message has
    text = _other_text(ending, title, sentences, language["cells"], slots, rng)
    _write(folder / f"{title}{ending}", _packed(ending, title, text, encoding))


def _filled(sentence: str, slots: dict[str, list[str]], rng: Any) -> str:
    names = [name for _, name, _, _ in string.Formatter().parse(sentence) if name]
    return sentence.format(
        **{name: str(rng.randint(2, 199)) if name == "n" else rng.choice(slots[name]) for name in names}
    )


def _other_text(
    ending: str, title: str, sentences: list[str], head: list[str], slots: dict[str, list[str]], rng: Any
) -> str:
    if between := TABLES.get(ending):
        rows = [head, *([each, rng.choice(slots["place"]), str(rng.randint(1, 99))] for each in sentences)]
        lines = [between.join(cell.replace(";", ",") for cell in row) for row in rows]
        return "\n".join([title, *lines] if between == CELL else lines)
    if mark := COMMENTS.get(ending):
        return "\n".join(
            f"{mark}{each}\n{rng.choice(('check', 'read', 'send'))}_pump({rng.randint(1, 99)});" for each in sentences
        )
    match ending:
        case ".json":
            return json.dumps({"title": title, "entries": sentences}, ensure_ascii=False)
        case ".jsonl":
            return "\n".join(json.dumps({"title": title, "entry": each}) for each in sentences)
        case ".yaml":
            return "\n".join([f"title: {title}", *(f"- {json.dumps(each, ensure_ascii=False)}" for each in sentences)])
        case ".html" | ".xml":
            page = "".join(f"<p>{escape(each)}</p>" for each in sentences)
            return f"<html><head><title>{title}</title></head><body>{page}</body></html>"
        case ".eml":
            return "\n".join(["From: x@example.org", f"Subject: {title}", "", *sentences])
        case ".md" | ".ipynb":
            return "\n\n".join([f"# {title}", *sentences])
        case ".pptx":
            return PAGE.join([title, *sentences])
        case _:
            return "\n\n".join([title, *sentences])
