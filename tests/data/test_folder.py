import io

import pypdf
import pytest

from harness1.data import folder
from harness1.data.folder import read_html
from harness1.data.source import Fault, refuse
from harness1.errors import CorpusError


def pdf(text: str, title: str | None = None) -> bytes:
    """A one-page PDF that shows a line of text."""
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(300, 300)
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    stream = DecodedStreamObject()
    stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
    page[NameObject("/Contents")] = writer._add_object(stream)
    if title:
        writer.add_metadata({"/Title": title})
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def read(path) -> tuple[list[tuple[str, str, str]], list[str]]:
    problems: list[str] = []
    found = [(document.doc_id, document.title, document.text) for document in folder.read(path, noting(problems))]
    return found, problems


def noting(problems: list[str]) -> Fault:
    return lambda error: problems.append(str(error))


def fill(path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_every_kind_is_read_with_its_title_in_sorted_order(tmp_path) -> None:
    fill(
        tmp_path,
        {
            "b/notes.txt": "# not a heading here",
            "a.md": "intro\n\n## Setting up ##\n\n# Later",
            "b/page.HTML": "<title>Home</title><p>Hello</p>",
            "c d.htm": "<p>No title</p>",
            "doc.pdf": pdf("Hello paper", "A paper"),
            "plain.pdf": pdf("No name"),
            "quick.rst": ".. _quick:\n\n==========\nQuick tour\n==========\n\nFirst\n-----\nRun it.",
            "rest.rst": "===== =====\nno heading\n\n.. note:: x\n",
            "z.md": "\ufeffno heading, 100 % text",
        },
    )
    documents, problems = read(tmp_path)
    assert documents == [
        ("a.md", "Setting up", "intro\n\n## Setting up ##\n\n# Later"),
        ("b/notes.txt", "notes", "# not a heading here"),
        ("b/page.HTML", "Home", "Hello"),
        ("c d.htm", "c d", "No title"),
        ("doc.pdf", "A paper", "Hello paper"),
        ("plain.pdf", "plain", "No name"),
        ("quick.rst", "Quick tour", ".. _quick:\n\n==========\nQuick tour\n==========\n\nFirst\n-----\nRun it."),
        ("rest.rst", "rest", "===== =====\nno heading\n\n.. note:: x\n"),
        ("z.md", "z", "no heading, 100 % text"),
    ]
    assert problems == []


def test_hidden_and_foreign_files_are_passed_over(tmp_path) -> None:
    fill(tmp_path, {".git/a.md": "x", ".b.txt": "x", "c.py": "x", "d.txt": "kept"})
    assert read(tmp_path) == ([("d.txt", "d", "kept")], [])


def test_broken_files_are_reported_and_left_out(tmp_path) -> None:
    whole = pdf("Hello")
    fill(
        tmp_path,
        {
            "1.txt": b"caf\xe9",
            "2.pdf": b"not a pdf at all",
            "3.pdf": whole[: len(whole) // 3],
            "4.md": " \n",
            "5.html": "<script>only()</script>",
            "6.txt": "kept",
        },
    )
    documents, problems = read(tmp_path)
    assert [name for name, _, _ in documents] == ["6.txt"]
    assert [problem.partition(":")[0] for problem in problems] == ["1.txt", "2.pdf", "3.pdf", "4.md", "5.html"]
    assert problems[0] == "1.txt: not UTF-8 text (byte 3)"


def test_a_folder_without_texts_is_an_error_at_once(tmp_path) -> None:
    fill(tmp_path, {"code.py": "x"})
    with pytest.raises(CorpusError, match=r"holds no \.md, \.rst, \.txt"):
        folder.read(tmp_path, refuse)


def test_html_is_text_by_blocks_without_scripts_and_styles() -> None:
    page = (
        "<html><head><title>A &amp; B\n page</title><style>p {x}</style></head><body><script>if (a < b) {}</script>"
        "<h1>Head</h1><p>One <b>bold</b>\n word&nbsp;here<br>next<ul><li>x<li>y</ul>"
        "<pre>a\nb</pre><svg><title>Icon</title></svg>tail"
    )
    assert read_html(page) == ("A & B page", "Head\nOne bold word here\nnext\nx\ny\na\nb\nIcontail")


@pytest.mark.parametrize(
    "page", ["<![if x]>text", "<p", "</", "<!--", "<a href='", "<script>", "&#xFFFFFFFF;", "<" * 2000]
)
def test_odd_html_breaks_nothing(tmp_path, page: str) -> None:
    fill(tmp_path, {"a.html": page, "b.txt": "kept"})
    documents, problems = read(tmp_path)
    assert len(documents) + len(problems) == 2
