"""Reads a folder of files as a corpus, or a single file: one document for each, in sections where it has places."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from harness1.data.apart import ReadApart
from harness1.data.contents import SNIFFED, Contents, NotText, Unreadable, is_binary
from harness1.data.formats import FORMATS, Format, format_of, missing, read_text
from harness1.data.source import Fault, Reading
from harness1.data.walk import Problem, Walk
from harness1.errors import CorpusError
from harness1.plain import digest, text_digest, utf8_safe
from harness1.plugins import plugin_names
from harness1.records import ChunkId, DocId
from harness1.retrieval.corpus import Document, GivenChunk, cut

EDITION = 3  # counts changes in how files are read
SECTION = 2048  # characters of a section above which it is cut, as documents are
BETWEEN = "\n\n"  # joins sections


def read(
    path: Path, fault: Fault, reading: Reading, *, follow_links: bool = False, everything: bool = False
) -> Iterator[Document]:
    """Yield the files below a folder, sorted by their path within it, which is also their id, or the one file. A
    title is the file's own, or the first heading, else its name. `fault`: gets what is left out; `reading`: what was
    passed over, and how the rest was read. Raises CorpusError: at once, if there is no file."""

    def problem(name: str, why: str) -> None:
        fault(CorpusError(f"{_show_name(name)}: {why}"))

    reading.clear()
    if path.is_file():
        return _documents(path.parent, [path.name], problem, reading)
    walk = Walk(path, problem, follow_links=follow_links, everything=everything)
    files = sorted(walk.files())
    reading.skipped += map(_show_name, walk.skipped)
    if not files:
        raise CorpusError("; ".join([f"{path} holds no files", *reading.lines()]))
    return _documents(path, files, problem, reading)


def state(path: Path) -> str:
    """Return a value that changes with the name, size or time of any file, also behind links."""
    names = Walk(path, lambda name, why: None, follow_links=True, everything=True).files()
    found = ((repr(name), (path / name).stat()) for name in sorted(names))
    return digest([(name, status.st_size, status.st_mtime_ns) for name, status in found])


def edition(*, everything: bool) -> str:
    """Return a value that changes with what can be read here: the formats, and the packages that they need."""
    absent = sorted(ending for ending, form in FORMATS.items() if missing(form))
    return digest([EDITION, everything, absent, find_spec("cryptography") is None, plugin_names("readers")])


def _show_name(name: str) -> str:
    return repr(name) if name != utf8_safe(name) else name


MARKUP, PAGES = frozenset({"adoc", "md", "org", "rst", "txt"}), frozenset({"htm", "html", "xhtml"})
MOST_BESIDE = 8  # files of one name that one is compared with: thousands may differ in the case of letters alone
ALIKE, AS_LONG = 0.9, 0.5  # share of the words of what is left out in what is kept, and of their numbers of words
_WORD = re.compile(r"\w+")


class _Texts:
    """The texts of a folder so far, by their digests; and the words of a page and its source that stand together."""

    def __init__(self, files: Sequence[str]) -> None:
        self._first: dict[str, str] = {}
        self._beside: dict[str, list[tuple[str, bool, set[str]]]] = {}
        parts = (name.lower().rpartition(".") for name in files)
        self._stems = Counter(stem for stem, _, ending in parts if ending in MARKUP | PAGES)

    def first_with(self, name: str, text: str) -> str:
        """Return the first file with the text of a file, or with that of its page or source; else its own name."""
        first = self._first.setdefault(text_digest(text), name)
        stem, _, ending = name.lower().rpartition(".")
        if first != name or self._stems[stem] < 2 or ending not in MARKUP | PAGES:
            return first
        words, is_page = {*_WORD.findall(text.lower())}, ending in PAGES
        for other, other_is_page, known in self._beside.get(stem, ()):
            few, many = sorted((len(words), len(known)))
            if is_page != other_is_page and len(words & known) >= ALIKE * len(words) and few >= AS_LONG * many:
                return other
        self._beside = {stem: [*self._beside.get(stem, ())[-MOST_BESIDE:], (name, is_page, words)]}
        return name


def _documents(path: Path, files: list[str], problem: Problem, reading: Reading) -> Iterator[Document]:
    texts = _Texts(files)
    with ReadApart() as apart:
        for name in files:
            file = path / name
            try:
                name.encode()
                found = _read(file, apart)
                text = BETWEEN.join(section for _, section in found.sections)
                if not text.strip():
                    raise Unreadable("no text in it")
            except UnicodeEncodeError:
                problem(name, "the name of the file is not UTF-8")
            except NotText as error:
                reading.unread[ending := file.suffix.lower() or "no ending"] += 1
                reading.absent.update([ending] if error.is_absent else [])
            except Unreadable as error:
                problem(name, str(error))
            except OSError as error:
                problem(name, f"cannot be read: {error.strerror}")
            else:
                if found.notice:
                    reading.notices.append(f"{name}: {found.notice}")
                first = texts.first_with(name, text)
                if first != name:
                    reading.copies.setdefault(first, []).append(name)
                    continue
                chunks = tuple(_chunks(name, found)) if any(anchor for anchor, _ in found.sections) else ()
                yield Document(DocId(name), found.title.strip() or file.stem, text, chunks)


def _chunks(name: str, found: Contents) -> Iterator[GivenChunk]:
    """Yield the sections of a document as its chunks, by their anchors; parts of a long one are numbered."""
    at, taken, further = 0, set[str](), Counter[str]()
    for anchor, section in found.sections:
        for start, end in cut(section, SECTION):
            chunk_id = f"{name}#{anchor}"
            while chunk_id in taken:  # thousands of sections may have one anchor
                further[anchor] += 1
                chunk_id = f"{name}#{anchor}&part={1 + further[anchor]}"
            taken.add(chunk_id)
            yield GivenChunk(ChunkId(chunk_id), at + start, at + end)
        at += len(section) + len(BETWEEN)


def _read(file: Path, apart: ReadApart) -> Contents:
    ending = file.suffix.lower()
    known = format_of(ending)
    form = known or Format()
    if missing(form):
        raise NotText(is_absent=True)
    # What became something else since it was found is not waited for.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise Unreadable("not a regular file")
        data = opened.read(SNIFFED)
        if known is None and is_binary(data):
            raise NotText
        data += opened.read(form.most + 1 - len(data))
    form.check_size(data)
    if form.read is None and b"\0" not in data:
        with suppress(UnicodeDecodeError):  # else a detector may be needed, or worse
            data.decode()
            return read_text(form, data)
    return apart.read(ending, data)
