"""Reads a folder of texts as a corpus: Markdown, plain text, HTML and PDF, one document for each file."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from harness1.data.formats.html import read_html
from harness1.errors import CorpusError
from harness1.records import DocId
from harness1.retrieval.corpus import Document

SUFFIXES = (".md", ".txt", ".html", ".htm", ".pdf")
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)


class _Unreadable(Exception):
    """The file cannot become a document; the message says why."""


def read(path: Path, problems: list[str]) -> Iterator[Document]:
    """Yield the readable files below a folder, sorted by their path within it, which is also their id.

    A title is the page's or the PDF's own, or the first heading of a Markdown file, else the file name without its
    suffix. Hidden files and folders, and links to folders, are skipped.

    Args:
        problems: gets one line for each file that is broken, not UTF-8, or without any text; it is left out.

    Raises:
        CorpusError: at once, if there is no file of a known kind.
    """
    files = sorted(_files(path))
    if not files:
        raise CorpusError(f"{path} holds no {', '.join(SUFFIXES)} files")
    return _documents(path, files, problems)


def _documents(path: Path, files: list[str], problems: list[str]) -> Iterator[Document]:
    for name in files:
        file = path / name
        try:
            title, text = _read_pdf(file) if file.suffix.lower() == ".pdf" else _read_text(file)
            if not text.strip():
                raise _Unreadable("no text in it")
            doc_id = DocId(name)
            doc_id.encode()
        except UnicodeEncodeError:
            problems.append(f"{name!r}: the name of the file is not UTF-8")
        except (_Unreadable, OSError) as error:
            problems.append(f"{name}: {error}")
        else:
            yield Document(doc_id=doc_id, title=title.strip() or file.stem, text=text)


def _files(path: Path) -> Iterator[str]:
    """Yield the paths of the files of a known kind, relative, with forward slashes."""
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.suffix.lower() in SUFFIXES and file.is_file():
                yield file.relative_to(path).as_posix()


def _read_text(file: Path) -> tuple[str, str]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _Unreadable(f"not UTF-8 text (byte {error.start})") from error
    if file.suffix.lower() in (".html", ".htm"):
        try:
            return read_html(text)
        except AssertionError as error:
            raise _Unreadable(f"broken HTML ({error})") from error
    heading = HEADING.search(text) if file.suffix.lower() == ".md" else None
    return heading.group(1) if heading else "", text


def _read_pdf(file: Path) -> tuple[str, str]:
    """Return title and text of a PDF. Its reader fails on broken files in many ways, each of which concerns this file
    alone."""
    import pypdf
    import pypdf.errors

    try:
        reader = pypdf.PdfReader(file)
        pages = [page.extract_text() for page in reader.pages]
        title = str((reader.metadata and reader.metadata.title) or "")
    except (
        *(pypdf.errors.PyPdfError, pypdf.errors.DependencyError, ValueError, TypeError, AttributeError, LookupError),
        *(ArithmeticError, AssertionError, NotImplementedError, RecursionError, zlib.error),
    ) as error:
        raise _Unreadable(f"broken or locked PDF ({type(error).__name__}: {error})") from error
    # Broken fonts yield halves of surrogate pairs, which no UTF-8 file can hold.
    return title.encode("utf-8", "ignore").decode(), "\n\n".join(pages).encode("utf-8", "ignore").decode()
