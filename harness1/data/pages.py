"""Pages and office documents: HTML, PDF, and what the extra `documents` reads, as title and sections."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from xml.parsers.expat import ExpatError

from selectolax.lexbor import LexborHTMLParser

from harness1.data.contents import (
    BROKEN,
    TEXT_BYTES,
    Contents,
    Unreadable,
    decoded,
    is_binary,
    reason,
    table_text,
    whole,
)
from harness1.errors import MissingExtra, optional

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

TEXT = "-text"
HIDDEN = frozenset({"script", "style", "iframe", "noembed", "noframes"})
"""Elements without text of the page. A browser keeps the tags in the last three as plain characters, and shows none."""
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "details", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr",
    "li", "main", "nav", "ol", "option", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead",
    "tr", "ul",
})  # fmt: skip
CELLS, AFTER_CELL = frozenset({"td", "th"}), "\x1f"


def read_html(page: str) -> tuple[str, str]:
    """Return the title of a page and its text: one line for each block and each row of a table. The time may grow
    with the square of the depth of a page, which only hostile ones make large."""
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
            elif node.tag in CELLS:
                text.append(AFTER_CELL)
            inside, node = node.next, node.parent
        node = inside
    rows = ([" ".join(cell.split()) for cell in line.split(AFTER_CELL)] for line in "".join(text).split("\n"))
    lines = (" | ".join(row[:-1] if len(row) > 1 and not row[-1] else row) for row in rows)
    return " ".join("".join(title).split()), "\n".join(line for line in lines if line)


def read_page(data: bytes) -> Contents:
    """Return what an HTML page holds."""
    page, notice = decoded(data, declares=True)
    return whole(*read_html(page), notice)


NEEDS_OCR = "its pages have no text: if they are pictures, ocrmypdf IN.pdf OUT.pdf makes one that has, to be indexed"
_LIGATURES = dict(zip(range(0xFB00, 0xFB07), ("ff", "fi", "fl", "ffi", "ffl", "st", "st"), strict=True))
_UNPRINTED = str.maketrans({**_LIGATURES, 0x200B: None})
_SOFT_HYPHEN = re.compile(r"\u00ad(?:[ \t]*\r?\n[ \t]*)?")
_HYPHENATED = re.compile(r"(?<![^\W\d_])([^\W\d_]{2,40})[-\u2010][ \t]*\r?\n[ \t]*([^\W\d_]{2,40})")
_AT_LINE_END = re.compile(r"[-\u2010][ \t]*\r?\n")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")


def join_hyphenated(pages: Sequence[str]) -> list[str]:
    """Return pages whose words go on over no end of a line. A word is written as it is elsewhere in the text, with
    its hyphen or without, else both ways, because nobody can know."""
    pages = [_SOFT_HYPHEN.sub("", page) for page in pages]
    if not any(map(_AT_LINE_END.search, pages)):
        return pages
    known = {word.lower() for page in pages for word in _WORD.findall(_HYPHENATED.sub(" ", page))}

    def join(found: re.Match[str]) -> str:
        joined, printed = found[1] + found[2], f"{found[1]}-{found[2]}"
        if not found[2][0].islower() or (printed.lower() in known and joined.lower() not in known):
            return printed
        return joined if joined.lower() in known else f"{joined} ({printed})"

    return [_HYPHENATED.sub(join, page) for page in pages]


def read_pdf(data: bytes) -> Contents:
    """Return what a PDF holds: a section for each page, with its number."""
    import pypdf
    import pypdf.errors

    pages, size = list[str](), 0
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        for page in reader.pages:
            # Broken fonts yield halves of surrogate pairs, which no UTF-8 file can hold.
            pages.append(page.extract_text().encode("utf-8", "ignore").decode().translate(_UNPRINTED))
            size += len(pages[-1])
            if size > TEXT_BYTES:
                break
        title = str((reader.metadata and reader.metadata.title) or "").encode("utf-8", "ignore").decode()
    except pypdf.errors.DependencyError as error:
        raise MissingExtra("cryptography, which reads this locked PDF,", "documents") from error
    except (pypdf.errors.PyPdfError, pypdf.errors.DeprecationError, zlib.error, NotImplementedError, *BROKEN) as error:
        raise Unreadable(f"broken or locked PDF ({reason(error)})") from error
    if pages and not any(page.strip() for page in pages):
        raise Unreadable(NEEDS_OCR)
    return Contents(title, _numbered("page", join_hyphenated(pages)))


_MS, _OPEN = "application/vnd.openxmlformats-officedocument", "application/vnd.oasis.opendocument"
OFFICE: Mapping[str, str] = MappingProxyType({
    ".doc": "application/msword",
    ".epub": "application/epub+zip",
    ".msg": "application/vnd.ms-outlook",
    ".ods": f"{_OPEN}.spreadsheet",
    ".odt": f"{_OPEN}.text",
    ".ppt": "application/vnd.ms-powerpoint",
    ".pptx": f"{_MS}.presentationml.presentation",
    ".rtf": "application/rtf",
    ".xls": "application/vnd.ms-excel",
    ".xlsx": f"{_MS}.spreadsheetml.sheet",
})  # fmt: skip
"""The kinds that kreuzberg reads, and its names for them. It loses `&` and `<` in .docx, which mammoth reads."""
INFLATED = 2 * TEXT_BYTES  # bytes of the markup of a document of Word
PACKED = (b"PK", b"\xd0\xcf\x11\xe0", b"{\\rtf")  # how each of them begins
_SLIDE = "\ue000"  # stands before each slide: for private use, so in hardly any text


_PAGE = re.compile(r"\s*+<(?:!doctype html|html|table)\b", re.IGNORECASE)


def _misnamed(data: bytes) -> Contents:
    """Return what a file holds that has the name of an office document and is a page, as some programs save their
    tables, or text."""
    if is_binary(data):
        raise Unreadable("it is not what its name says")
    text, notice = decoded(data, declares=True)
    return whole(*(read_html(text) if _PAGE.match(text) else ("", text)), notice)


def read_docx(data: bytes) -> Contents:
    """Return what a document of Word holds."""
    if not data.startswith(PACKED):
        return _misnamed(data)
    with optional("documents"):
        import mammoth

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(part.file_size for part in archive.infolist() if part.filename.endswith(".xml")) > INFLATED:
                raise Unreadable(f"it inflates to more than {INFLATED:,} bytes")
        without_pictures = mammoth.images.img_element(lambda image: {})
        page = mammoth.convert_to_html(io.BytesIO(data), convert_image=without_pictures).value
    except (zipfile.BadZipFile, zlib.error, ExpatError, NotImplementedError, *BROKEN) as error:
        raise Unreadable(f"broken or locked ({reason(error)})") from error
    heading = re.search(r"<h[1-3]>(.*?)</h[1-3]>", page, re.DOTALL)
    _, title = read_html(heading[1]) if heading else ("", "")
    _, text = read_html(re.sub(r"(<t[dh][^>]*>)<p>|</p>(?=</t[dh]>)", r"\1", page))
    return whole(title, text)


def read_office(ending: str, data: bytes) -> Contents:
    """Return what an office document, a book or a message of Outlook holds: a section for each sheet or slide."""
    if not data.startswith(PACKED):
        return _misnamed(data)
    with optional("documents"):
        import kreuzberg

    places = kreuzberg.PageConfig(insert_page_markers=True, marker_format=_SLIDE)
    one = kreuzberg.ConcurrencyConfig(max_threads=1)  # each thread takes addresses, which are limited here
    settings: dict[str, Any] = {"use_cache": False, "disable_ocr": True, "pages": places, "concurrency": one}
    try:
        found = kreuzberg.extract_bytes_sync(data, OFFICE[ending], kreuzberg.ExtractionConfig(**settings))
    except (kreuzberg.KreuzbergError, *BROKEN) as error:
        raise Unreadable(f"broken or locked ({reason(error)})") from error
    facts: Mapping[str, Any] = found.metadata
    title = str(facts.get("title") or facts.get("subject") or "")
    if names := facts.get("sheet_names"):
        tables = {table.page_number: table.cells for table in found.tables}
        texts = [table_text(tables.get(number, [])) for number in range(1, len(names) + 1)]
        sheets = [(f"sheet={name}", f"{name}\n{text}") for name, text in zip(names, texts, strict=True) if text]
        return Contents(title or ", ".join(names), sheets)
    slides = [slide.strip() for slide in found.content.split(_SLIDE)]
    if ending in (".ppt", ".pptx"):
        return Contents(title or "".join(slides[1:2]).partition("\n")[0], _numbered("slide", slides[1:]))
    return whole(title, "\n".join(slides))


def _numbered(kind: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"{kind}={number}", text) for number, text in enumerate(texts, start=1) if text.strip()]
