"""Reads a folder of texts as a corpus: Markdown, plain text, HTML and PDF, one document for each file.

HTML and PDF are read in a process of its own, within bounds of time and memory: parsers of these formats have inputs of
a few kilobytes that keep them busy for hours or fill the memory. Whatever a file does to the process, only it is lost.
"""

from __future__ import annotations

import io
import os
import re
import resource
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
from selectolax.lexbor import LexborHTMLParser

from harness1.data.source import Fault, status_of
from harness1.errors import CorpusError
from harness1.plain import digest, utf8_safe
from harness1.records import DocId
from harness1.retrieval.corpus import Document

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
    title, text, verbatim, in_title = list[str](), list[str](), 0, False
    node: LexborNode | None = LexborHTMLParser(page).root
    while node is not None:
        if node.tag == TEXT:
            found = node.text_content or ""
            (title if in_title else text).append(found if in_title or verbatim else re.sub(r"\s+", " ", found))
        elif node.tag == "title":
            in_title = not title  # drawings have titles too: the page's own is the first
        elif node.tag in BLOCKS:
            text.append("\n")
            verbatim += node.tag == "pre"
        inside = None if node.tag in HIDDEN else node.first_child
        while inside is None and node is not None:  # it is left, and so are those that it ends
            in_title = in_title and node.tag != "title"
            if node.tag in BLOCKS:
                text.append("\n")
                verbatim -= node.tag == "pre"
            inside, node = node.next, node.parent
        node = inside
    lines = (" ".join(line.split()) for line in "".join(text).split("\n"))
    return " ".join("".join(title).split()), "\n".join(line for line in lines if line)


SECONDS, SECONDS_PER_MIB, MOST_SECONDS = 30.0, 30.0, 300.0
"""Processor time for a file, by its size: honest work is linear in it, at well under a second for each 100 kB."""
MEMORY = 2 << 30  # bytes of memory for one file; the largest honest ones take a quarter of it
TEXT_BYTES = 32 << 20  # largest text of a document, a hundred times a thick book. Longer ones are bombs, logs or data.
LONGEST_REASON = 200  # characters of an error of a parser, which may repeat the file


class Unreadable(Exception):
    """The file cannot become a document; the message says why."""


class ReadApart:
    """Reads files in another process, begun again after one that ended it. `share`: scales the time for a file."""

    def __init__(self, share: float = 1.0, memory: int = MEMORY) -> None:
        self._share, self._memory = share, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def read(self, kind: str, data: bytes) -> tuple[str, str]:
        """Return title and text of html or pdf. Raises Unreadable: it is broken, or takes too much time or memory."""
        seconds = self._share * min(SECONDS + SECONDS_PER_MIB * len(data) / (1 << 20), MOST_SECONDS)
        line = self._line or self._begin()
        try:
            line.send_bytes(msgspec.msgpack.encode((kind, seconds)))
            line.send_bytes(data)
            title, text, problem = msgspec.msgpack.decode(line.recv_bytes(), type=tuple[str, str, str])
        except (EOFError, OSError) as error:
            self._end()
            raise Unreadable(f"reading it takes more than {seconds:.0f} s or fails within its parser") from error
        if problem:
            raise Unreadable(problem)
        return title, text

    def _begin(self) -> Connection:
        self._line, theirs = Pipe()
        # A module started by its name would be looked for in the current folder.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve(*map(int, sys.argv[1:]))"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(self._memory)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # parsers complain there about what they could mend
                start_new_session=True,  # an interrupt is for the command alone
            )
        return self._line

    def _end(self) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.kill()
            self._process.wait()
        self._line = self._process = None


def serve(descriptor: int, memory: int) -> None:
    """Answer with the content of files until the connection is closed; one that takes too long ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError):  # macOS has no such limit, and a lower one is there to stay
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with Connection(descriptor) as line:
        while True:
            try:
                kind, seconds = msgspec.msgpack.decode(line.recv_bytes(), type=tuple[str, float])
                data = line.recv_bytes()
            except EOFError:
                return
            used = resource.getrusage(resource.RUSAGE_SELF)
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))
            line.send_bytes(msgspec.msgpack.encode(_answer(kind, data)))


def _answer(kind: str, data: bytes) -> tuple[str, str, str]:
    """Return the title and the text of a file, or, as the third, why it has none."""
    try:
        title, text = _read_pdf(data) if kind == "pdf" else read_html(data.decode())
    except Unreadable as error:
        return "", "", str(error)
    except MemoryError:
        return "", "", "reading it takes too much memory"
    is_long = len(title) + len(text) > TEXT_BYTES
    return ("", "", f"its text has more than {TEXT_BYTES:,} characters") if is_long else (title, text, "")


def _read_pdf(data: bytes) -> tuple[str, str]:
    import pypdf
    import pypdf.errors

    pages, size = [], 0
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        for page in reader.pages:
            pages.append(page.extract_text())
            size += len(pages[-1])
            if size > TEXT_BYTES:
                break
        title = str((reader.metadata and reader.metadata.title) or "")
    except (
        *(pypdf.errors.PyPdfError, pypdf.errors.DependencyError, pypdf.errors.DeprecationError, zlib.error),
        *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
        *(NotImplementedError, RecursionError),
    ) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unreadable(f"broken or locked PDF ({why[:LONGEST_REASON]})") from error
    # Broken fonts yield halves of surrogate pairs, which no UTF-8 file can hold.
    return title.encode("utf-8", "ignore").decode(), "\n\n".join(pages).encode("utf-8", "ignore").decode()


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
