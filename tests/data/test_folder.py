"""Files of a folder become documents; one that cannot be read is named and left out, whatever it does to its reader."""

import gzip
import io
import os
import tracemalloc
import zlib
from pathlib import Path

import pypdf
import pytest

from harness1.data import folder, tables, trec
from harness1.data.apart import ReadApart
from harness1.data.contents import Unreadable
from harness1.data.formats import FORMATS, Format
from harness1.data.open import MOST_LEFT_OUT, open_source
from harness1.data.pages import read_html
from harness1.data.source import DuplicateId, Reading, refuse
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
    documents = folder.read(path, problems.append, Reading())
    return [(document.doc_id, document.title, document.text) for document in documents], list(map(str, problems))


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


def test_broken_files_are_reported_and_left_out(tmp_path) -> None:
    whole = pdf("Hello")
    fill(tmp_path, {"1.txt": b"\xff\xfe", "2.pdf": b"not a pdf at all", "3.pdf": whole[: len(whole) // 3]})
    fill(tmp_path, {"4.md": " \n", "5.html": "<script>only()</script>", "6.txt": "kept"})
    documents, problems = read(tmp_path)
    assert [name for name, _, _ in documents] == ["6.txt"]
    assert [problem.partition(":")[0] for problem in problems] == ["1.txt", "2.pdf", "3.pdf", "4.md", "5.html"]
    assert problems[0] == "1.txt: no text in it"


def test_a_folder_without_texts_is_an_error_at_once(tmp_path) -> None:
    fill(tmp_path, {".hidden": "x"})
    with pytest.raises(CorpusError, match=r"holds no files; 1 passed over: \.hidden \(--all reads them\)"):
        folder.read(tmp_path, refuse, Reading())


def test_html_is_text_by_blocks_without_scripts_and_styles() -> None:
    page = (
        "<html><head><title>A &amp; B\n page</title><style>p {x}</style></head><body><script>if (a < b) {}</script>"
        "<h1>Head</h1><p>One <b>bold</b>\n word&nbsp;here<br>next<ul><li>x<li>y</ul>"
        "<pre>a\nb</pre><svg><title>Icon</title></svg>tail"
    )
    assert read_html(page) == ("A & B page", "Head\nOne bold word here\nnext\nx\ny\na\nb\nIcontail")


SHOWN = b"BT /F1 12 Tf 20 200 Td (Hello) Tj ET"
GOOD = '{"id": "good", "text": "x"}\n'
DEEP = '{"id": "deep", "text": "x", "more": ' + "[" * 100_000 + "]" * 100_000 + "}\n"


def open_folder(path: Path, **options: bool) -> tuple[list[str], list[str]]:
    """The ids of the documents below a folder, and what was left out."""
    source = open_source(str(path), **options)
    return [document.doc_id for document in source.documents()], source.problems


def left_out(path: Path, content: bytes) -> str:
    """Write a file beside a good one, and return why it is left out, "" if it is not."""
    path.write_bytes(content)
    (path.parent / "z.txt").write_text("kept")
    with hostile.ends():
        documents, problems = open_folder(path.parent)
    assert documents[-1] == "z.txt"
    assert len(documents) + len(problems) == 2
    return problems[0].removeprefix(f"{path.name}: ") if problems else ""


@pytest.mark.parametrize(
    "page",
    ["&#" + "9" * 5000 + ";", "&#x" + "f" * 5000, "<!--" * 300_000, "</" * 600_000, "<?" * 600_000, "<!" * 600_000],
)
def test_hostile_markup_is_read_at_once(tmp_path: Path, page: str) -> None:
    assert left_out(tmp_path / "a.html", f"text {page}".encode()) == ""


@pytest.mark.parametrize(
    ("bounds", "page", "says"),
    [({"share": 0.01}, b"<div>" * 400_000, "takes more than"), ({"memory": 400 << 20}, b"<i>" * 5_000_000, "takes")],
)
def test_a_page_that_takes_too_much_time_or_memory_is_left_out_and_the_next_is_read(bounds, page, says) -> None:
    with ReadApart(**bounds) as apart, hostile.ends():
        assert apart.read(".html", b"<title>T</title>one") == ("T", [("", "one")], "")
        with pytest.raises(Unreadable, match=says):
            apart.read(".html", page)
        assert apart.read(".html", b"two") == ("", [("", "two")], "")


BOMB = zlib.compress(zlib.compress(b"(a) Tj " * (16 << 20)))
KIDS = b"<< /Type /Catalog /Pages 2 0 R >>"


@pytest.mark.parametrize(
    "document",
    [
        hostile.page(SHOWN, b"/Filter /Fl "),
        hostile.page(SHOWN, b"/Filter 7 "),
        hostile.page(BOMB, b"/Filter [/FlateDecode /FlateDecode] "),
        hostile.page(SHOWN, b"/Filter [" + b"/ASCIIHexDecode " * 100_000 + b"] "),
        hostile.pdf(KIDS, b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"),
        hostile.pdf(KIDS, b"<< /Type /Pages /Kids [3 0 R] /Count 999999999 >>", b"3 0 R"),
        hostile.pdf(KIDS, b"[" * 100_000 + b"]" * 100_000),
        hostile.pdf(b"<< /Type /Catalog /Pages " + b"<< /Kids [" * 20_000),
        b"%PDF-1.4\n" + b"1 0 obj\n" * 100_000 + b"startxref\n9\n%%EOF",
    ],
    ids=["filter", "number", "bomb", "filters", "circle", "count", "deep", "open", "table"],
)
def test_a_broken_pdf_is_left_out_alone(tmp_path: Path, document: bytes) -> None:
    assert left_out(tmp_path / "a.pdf", document)


def test_a_large_file_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "format_of", {**FORMATS, ".txt": Format(most=4)}.get)
    assert left_out(tmp_path / "a.txt", b"12345") == "larger than 4 bytes"


def test_the_title_of_a_text_takes_linear_time(tmp_path: Path) -> None:
    assert left_out(tmp_path / "a.md", b"# a" + b" #" * 400_000 + b"b") == ""
    assert left_out(tmp_path / "a.md", b"# a" + b" \t" * 400_000 + b"b") == ""


def test_links_that_lead_out_are_not_followed_unless_asked(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (inside / "a.txt").write_text("kept")
    links = {"file.txt": "/etc/passwd", "folder": outside, "up": "..", "own.txt": "a.txt", "again": "."}
    for name, target in links.items():
        (inside / name).symlink_to(target)
    documents, problems = open_folder(inside)
    assert documents == ["a.txt"]  # own.txt has the same text
    assert [problem.partition(":")[0] for problem in problems] == ["file.txt", "folder", "up"]
    assert all("leads out of the folder" in problem for problem in problems)
    documents, problems = open_folder(inside, follow_links=True)
    assert {"a.txt", "file.txt", "folder/secret.txt"} <= {*documents}
    assert problems == []
    before = open_source(str(inside), follow_links=True).fingerprint
    (outside / "secret.txt").write_text("another")
    assert open_source(str(inside), follow_links=True).fingerprint != before


def test_circles_of_links_end_and_one_that_leads_nowhere_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.txt").write_text("x")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "self.txt").symlink_to("self.txt")
    (tmp_path / "far").symlink_to("x" * 300)  # too long for a name, as unreachable as what lies in a locked folder
    (tmp_path / "far.txt").symlink_to("x" * 300)
    for follow in (False, True):
        with hostile.ends():
            documents, problems = open_folder(tmp_path, follow_links=follow)
        assert documents == ["a/b.txt"]
        assert problems == [f"{name}: not a regular file" for name in ("far", "far.txt", "self.txt")]


def test_pipes_devices_and_sockets_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "b")
    (tmp_path / "z.txt").write_text("kept")
    with hostile.ends():
        documents, problems = open_folder(tmp_path)
    assert (documents, problems) == (["z.txt"], ["a.txt: not a regular file", "b: not a regular file"])
    os.mkfifo(tmp_path / "c.jsonl")
    with hostile.ends(), pytest.raises(CorpusError, match=r"c\.jsonl: not a regular file"):
        list(open_source(str(tmp_path / "c.jsonl")).documents())


def test_folders_are_entered_to_a_depth(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("kept")
    deep = tmp_path / "/".join("d" * 1200)
    try:
        for folder in (*reversed(deep.parents), deep):
            folder.mkdir(exist_ok=True)
        source = open_source(str(tmp_path))
        assert [document.doc_id for document in source.documents()] == ["a.txt"]
        assert [problem.rpartition(": ")[2] for problem in source.problems] == ["folders are entered 100 levels deep"]
        assert source.fingerprint
    finally:  # by hand, because shutil.rmtree recurses
        while deep != tmp_path:
            deep.rmdir()
            deep = deep.parent


@pytest.mark.parametrize(
    "line", [DEEP, '{"id": "\xff\n', '{"id": ' + "9" * 5000 + ', "text": "x"}\n', '{"id": 1e999}\n']
)
def test_a_line_that_cannot_be_read_is_named_and_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(line.encode("latin-1") + GOOD.encode())
    assert open_folder(path, leave_out=True)[0] == ["good"]
    assert open_folder(path, leave_out=True)[1][0].startswith(f"{path}:1: ")
    for strict in (None, False):
        with pytest.raises(CorpusError, match=r"docs\.jsonl:1: "):
            open_folder(path, leave_out=strict)


def test_a_line_too_long_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LINE_BYTES", 64)
    path = tmp_path / "docs.jsonl"
    path.write_text('{"id": "long", "text": "' + "x" * 999 + '"}\n' + GOOD + '{"id": 1}\n')
    documents, problems = open_folder(path, leave_out=True)
    assert documents == ["good"]
    assert problems[0] == f"{path}:1: longer than 64 bytes"
    assert problems[1].startswith(f"{path}:3: ")


def test_a_packed_line_without_end_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b"a" * (100 << 20)))
    tracemalloc.start()
    with pytest.raises(CorpusError, match=r"docs\.jsonl\.gz: it inflates to more than 200 times its size"):
        open_folder(path, leave_out=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 << 20


def test_ids_that_repeat_and_files_full_of_faults_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(GOOD + GOOD)
    with pytest.raises(DuplicateId):
        open_folder(path, leave_out=True)
    path.write_text(GOOD + "x\n" * (MOST_LEFT_OUT + 1))
    with pytest.raises(CorpusError, match="more than 10,000 documents cannot be read"):
        open_folder(path, leave_out=True)


def test_a_benchmark_loses_documents_but_no_queries_and_judgements(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text("broken\n" + GOOD)
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "x?"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text("q\tgood\t1\n")
    source = open_source(str(tmp_path), leave_out=True)
    assert [document.doc_id for document in source.documents()] == ["good"]
    assert source.problems[0].startswith(f"{tmp_path / 'corpus.jsonl'}:1: not a JSON object")
    assert [task.task_id for task in source.tasks("test")] == ["q"]
    for name, text in (("queries.jsonl", DEEP), ("qrels/test.tsv", "q\tgood\t" + "9" * 99), ("qrels/test.tsv", "q\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(CorpusError, match=r"\.(jsonl|tsv):1: "):
            source.tasks("test")


@pytest.mark.parametrize("block", ["<a>" * 300_000, "<a" * 500_000, "<" + "a" * 1_000_000, "<a></a" + " " * 1_000_000])
def test_markup_of_trec_is_read_in_linear_time(tmp_path: Path, block: str) -> None:
    path = tmp_path / "docs.trec"
    path.write_text(f"<DOC>\n<DOCNO>1</DOCNO>x\n{block}\n</DOC>\n")
    with hostile.ends():
        assert [document.doc_id for document in trec.read_corpus(tmp_path)] == ["1"]


def test_a_block_of_trec_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trec, "LINE_BYTES", 64)
    path = tmp_path / "docs.trec"
    path.write_text("<DOC>\n" + "x\n" * 99 + "</DOC>\n<DOC>\n<DOCNO>1</DOCNO>x\n</DOC>\n")
    faults: list[CorpusError] = []
    assert [document.doc_id for document in trec.read_corpus(tmp_path, faults.append)] == ["1"]
    assert list(map(str, faults)) == [f"{path}:1: <DOC> is longer than 64 bytes"]


def test_quotes_of_a_table_are_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('"' + '""\n' * 400_000)
    with hostile.ends():
        assert len(list(tables.tsv_rows(path, lambda error: None, ("a",)))) > 100_000
