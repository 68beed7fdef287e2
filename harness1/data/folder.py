"""Reads a folder of texts as a corpus: Markdown, plain text, HTML and PDF, one document for each file."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from harness1.data.apart import TEXT_BYTES, ReadApart, Unreadable
from harness1.data.source import Fault, status_of
from harness1.errors import CorpusError
from harness1.plain import digest, utf8_safe
from harness1.records import DocId
from harness1.retrieval.corpus import Document

KINDS = {".md": "text", ".rst": "text", ".txt": "text", ".html": "html", ".htm": "html", ".pdf": "pdf"}
SUFFIXES = tuple(KINDS)
BYTES = {"text": TEXT_BYTES, "html": TEXT_BYTES, "pdf": 256 << 20}
"""Largest file of each kind that is read. Most of a large PDF is pictures."""
DEEPEST = 100  # levels of folders that are entered; archives of whole disks have 30
UNDERLINED = re.compile(r"""^(?=.*[^\W_])(\S.*?)[ \t\r]*\n([=\-~^"'#*+.:_`])\2{2,}[ \t\r]*$""", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}[ \t]+([^ \t\n].*)$", re.MULTILINE)

Problem = Callable[[str, str], None]
"""Called with the name of a file or folder within the corpus, and why it is left out."""


def read(path: Path, fault: Fault, *, follow_links: bool = False) -> Iterator[Document]:
    """Yield the readable files below a folder, sorted by their path within it, which is also their id; hidden ones are
    skipped. A title is the page's or the PDF's own, or the first heading, else the file name without its suffix.
    `fault`: gets one error for each file or folder that is left out. `follow_links`: read links to folders, and out of
    this one. Raises CorpusError: at once, if there is no file of a known kind."""

    def problem(name: str, why: str) -> None:
        shown = repr(name) if name != utf8_safe(name) else name
        fault(CorpusError(f"{shown}: {why}"))

    files = sorted(find_texts(path, problem, follow_links=follow_links))
    if not files:
        raise CorpusError(f"{path} holds no {', '.join(SUFFIXES)} files")
    return _documents(path, files, problem)


def state(path: Path) -> str:
    """Return a value that changes with the name, size or time of any file, also behind links."""
    names = find_texts(path, lambda name, why: None, follow_links=True)
    found = ((repr(name), (path / name).stat()) for name in sorted(names))
    return digest([(name, status.st_size, status.st_mtime_ns) for name, status in found])


def find_texts(path: Path, problem: Problem, *, follow_links: bool = False) -> Iterator[str]:
    """Yield the relative paths of the files of a known kind. A folder that links reach twice is entered once."""
    root, entered = os.path.realpath(path), set()
    folders = [(0, "")]
    while folders:
        depth, folder = folders.pop()
        try:
            entries = sorted(os.scandir(path / folder), key=lambda entry: entry.name)
            identity = (path / folder).stat()
        except OSError as error:
            problem(folder or ".", f"the folder cannot be listed: {error.strerror}")
            continue
        if (identity.st_dev, identity.st_ino) in entered:
            continue
        entered.add((identity.st_dev, identity.st_ino))
        inner = []
        for entry in entries:
            name, file = f"{folder}/{entry.name}" if folder else entry.name, path / folder / entry.name
            is_folder = False
            with suppress(OSError):
                is_folder = entry.is_dir()
            if entry.name.startswith(".") or not (file.suffix.lower() in KINDS or is_folder):
                continue
            if not follow_links and entry.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(root):
                problem(name, "a link that leads out of the folder (--follow-links reads it)")
            elif is_folder and depth == DEEPEST:
                problem(name, f"folders are entered {DEEPEST} levels deep")
            elif is_folder and (follow_links or not entry.is_symlink()):
                inner.append((depth + 1, name))
            elif status_of(file):
                yield name
            elif not is_folder:
                problem(name, "not a regular file")
        folders += reversed(inner)


def _documents(path: Path, files: list[str], problem: Problem) -> Iterator[Document]:
    with ReadApart() as apart:
        for name in files:
            file = path / name
            try:
                name.encode()
                title, text = _read(file, apart)
                if not text.strip():
                    raise Unreadable("no text in it")
            except UnicodeEncodeError:
                problem(name, "the name of the file is not UTF-8")
            except Unreadable as error:
                problem(name, str(error))
            except OSError as error:
                problem(name, f"cannot be read: {error.strerror}")
            else:
                yield Document(DocId(name), title.strip() or file.stem, text)


def _read(file: Path, apart: ReadApart) -> tuple[str, str]:
    kind = KINDS[file.suffix.lower()]
    # What became something else since it was found is not waited for.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise Unreadable("not a regular file")
        data = opened.read(BYTES[kind] + 1)
    if len(data) > BYTES[kind]:
        raise Unreadable(f"larger than {BYTES[kind]:,} bytes")
    if kind == "pdf":
        return apart.read(kind, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 text (byte {error.start})") from error
    if kind == "html":
        return apart.read(kind, text.encode())
    title, suffix = "", file.suffix.lower()
    if suffix == ".md" and (found := HEADING.search(text)):
        title = found[1].rstrip(" \t").rstrip("#").rstrip(" \t") or found[1][0]
    elif suffix == ".rst" and (found := UNDERLINED.search(text)):
        title = found[1].strip()
    return title, text
