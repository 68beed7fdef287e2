"""Reads a folder of texts as a corpus: Markdown, plain text, HTML and PDF, one document for each file."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from harness1.data.faults import Fault
from harness1.data.formats.apart import TEXT_BYTES, ReadApart, Unreadable
from harness1.data.source import status_of
from harness1.errors import CorpusError
from harness1.hashing import digest
from harness1.records import DocId
from harness1.retrieval.corpus import Document

KINDS = {".md": "text", ".rst": "text", ".txt": "text", ".html": "html", ".htm": "html", ".pdf": "pdf"}
SUFFIXES = tuple(KINDS)
BYTES = {"text": TEXT_BYTES, "html": TEXT_BYTES, "pdf": 256 << 20}
"""Largest file of each kind that is read. Most of a large PDF is pictures."""
DEEPEST = 100
"""Levels of folders that are entered; archives of whole disks have 30."""
UNDERLINED = re.compile(r"""^(?=.*[^\W_])(\S.*?)[ \t\r]*\n([=\-~^"'#*+.:_`])\2{2,}[ \t\r]*$""", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}[ \t]+([^ \t\n].*)$", re.MULTILINE)

Problem = Callable[[str, str], None]
"""Called with the name of a file or folder within the corpus, and why it is left out."""


def read(path: Path, fault: Fault, *, follow_links: bool = False) -> Iterator[Document]:
    """Yield the readable files below a folder, sorted by their path within it, which is also their id.

    A title is the page's or the PDF's own, or the first heading of a Markdown file, else the file name without its
    suffix. Hidden files and folders are skipped.

    Args:
        fault: gets one error for each file that is broken, not UTF-8, too large, without any text, no regular file, or
            outside of the folder; and for each folder that cannot be listed. It is left out.
        follow_links: read links that lead out of the folder, and links to folders.

    Raises:
        CorpusError: at once, if there is no file of a known kind.
    """

    def problem(name: str, why: str) -> None:
        fault(CorpusError(f"{name}: {why}"))

    files = sorted(find_files(path, problem, follow_links=follow_links))
    if not files:
        raise CorpusError(f"{path} holds no {', '.join(SUFFIXES)} files")
    return _documents(path, files, problem)


def state(path: Path) -> str:
    """Return a value that changes with the name, size or time of any file, also behind links."""
    names = find_files(path, lambda name, why: None, follow_links=True)
    found = ((repr(name), (path / name).stat()) for name in sorted(names))
    return digest([(name, status.st_size, status.st_mtime_ns) for name, status in found])


def find_files(path: Path, problem: Problem, *, follow_links: bool = False) -> Iterator[str]:
    """Yield the paths of the files of a known kind, relative, with forward slashes. A folder that links reach twice is
    entered once."""
    root, entered = os.path.realpath(path), set()
    folders = [(0, "")]
    while folders:
        depth, folder = folders.pop()
        try:
            entries = sorted(os.scandir(path / folder), key=lambda entry: entry.name)
            identity = (path / folder).stat()
        except OSError as error:
            problem(_shown(folder or "."), f"the folder cannot be listed: {error.strerror}")
            continue
        if (identity.st_dev, identity.st_ino) in entered:
            continue
        entered.add((identity.st_dev, identity.st_ino))
        inner = []
        for entry in entries:
            name, file = f"{folder}/{entry.name}" if folder else entry.name, path / folder / entry.name
            is_folder = _is_folder(entry)
            if entry.name.startswith(".") or not (file.suffix.lower() in KINDS or is_folder):
                continue
            if not follow_links and entry.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(root):
                problem(_shown(name), "a link that leads out of the folder (--follow-links reads it)")
            elif is_folder and depth == DEEPEST:
                problem(_shown(name), f"folders are entered {DEEPEST} levels deep")
            elif is_folder and (follow_links or not entry.is_symlink()):
                inner.append((depth + 1, name))
            elif status_of(file):
                yield name
            elif not is_folder:
                problem(_shown(name), "not a regular file")
        folders += reversed(inner)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one that can be reached."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _documents(path: Path, files: list[str], problem: Problem) -> Iterator[Document]:
    with ReadApart() as apart:
        for name in files:
            file = path / name
            try:
                title, text = _read(file, apart)
                if not text.strip():
                    raise Unreadable("no text in it")
                doc_id = DocId(name)
                doc_id.encode()
            except UnicodeEncodeError:
                problem(_shown(name), "the name of the file is not UTF-8")
            except Unreadable as error:
                problem(_shown(name), str(error))
            except OSError as error:
                problem(_shown(name), f"cannot be read: {error.strerror}")
            else:
                yield Document(doc_id=doc_id, title=title.strip() or file.stem, text=text)


def _shown(name: str) -> str:
    """Return a name for messages: as it is if it is UTF-8, else escaped and in quotes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return repr(name)
    return name


def _read(file: Path, apart: ReadApart) -> tuple[str, str]:
    kind = KINDS[file.suffix.lower()]
    data = _content(file, BYTES[kind])
    if kind == "pdf":
        return apart.read(kind, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 text (byte {error.start})") from error
    if kind == "html":
        return apart.read(kind, text.encode())
    return TITLES.get(file.suffix.lower(), lambda _: "")(text), text


def heading_of(text: str) -> str:
    """Return the first heading of a Markdown text without its marks, or ""."""
    found = HEADING.search(text)
    return (found[1].rstrip(" \t").rstrip("#").rstrip(" \t") or found[1][0]) if found else ""


def underlined(text: str) -> str:
    """Return the first underlined heading of a reStructuredText, or ""."""
    found = UNDERLINED.search(text)
    return found[1].strip() if found else ""


TITLES = {".md": heading_of, ".rst": underlined}
"""Titles of texts whose format has headings, by the ending of the file."""


def _content(file: Path, most: int) -> bytes:
    """Return the bytes of a regular file; what became something else since it was found is not waited for."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise Unreadable("not a regular file")
        data = opened.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"larger than {most:,} bytes")
    return data
