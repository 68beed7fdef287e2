import io

import pypdf
import pytest

from harness1.data import folder
from harness1.data.folder import read_html
from harness1.data.source import refuse
from harness1.errors import CorpusError
from tests.data import hostile


def pdf(text: str, title: str = "") -> bytes:
    """A one-page PDF that shows a line of text."""
    writer = pypdf.PdfWriter(io.BytesIO(hostile.page(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())))
    if title:
        writer.add_metadata({"/Title": title})
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def read(path) -> tuple[list[tuple[str, str, str]], list[str]]:
    problems: list[CorpusError] = []
    found = [(document.doc_id, document.title, document.text) for document in folder.read(path, problems.append)]
    return found, list(map(str, problems))


def fill(path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_every_kind_is_read_with_its_title_in_sorted_order(tmp_path) -> None:
    tour = ".. _quick:\n\n==========\nQuick tour\n==========\n\nFirst\n-----\nRun it."
    found = [
        ("a.md", "intro\n\n## Setting up ##\n\n# Later", "Setting up", None),
        ("b/notes.txt", "# not a heading here", "notes", None),
        ("b/page.HTML", "<title>Home</title><p>Hello</p>", "Home", "Hello"),
        ("c d.htm", "<p>No title</p>", "c d", "No title"),
        ("doc.pdf", pdf("Hello paper", "A paper"), "A paper", "Hello paper"),
        ("plain.pdf", pdf("No name"), "plain", "No name"),
        ("quick.rst", tour, "Quick tour", None),
        ("rest.rst", "===== =====\nno heading\n\n.. note:: x\n", "rest", None),
        ("z.md", "\ufeffno heading, 100 % text", "z", "no heading, 100 % text"),
    ]
    fill(tmp_path, {name: content for name, content, _, _ in found})
    assert read(tmp_path) == ([(name, title, text or content) for name, content, title, text in found], [])


def test_hidden_and_foreign_files_are_passed_over(tmp_path) -> None:
    fill(tmp_path, {".git/a.md": "x", ".b.txt": "x", "c.py": "x", "d.txt": "kept"})
    assert read(tmp_path) == ([("d.txt", "d", "kept")], [])


def test_broken_files_are_reported_and_left_out(tmp_path) -> None:
    whole = pdf("Hello")
    fill(tmp_path, {"1.txt": b"caf\xe9", "2.pdf": b"not a pdf at all", "3.pdf": whole[: len(whole) // 3]})
    fill(tmp_path, {"4.md": " \n", "5.html": "<script>only()</script>", "6.txt": "kept"})
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
