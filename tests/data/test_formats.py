"""Files of every kind are read, what is not read is said, and places within files keep their names."""

import csv
import io
import json
from email.message import EmailMessage
from itertools import product
from pathlib import Path

import pypdf
import pytest

from harness1.data import folder, formats
from harness1.data.contents import Contents, Unreadable
from harness1.data.formats import read_file
from harness1.data.open import open_source
from harness1.errors import CorpusError
from harness1.plugins import find_plugin
from tests.data import hostile
from tests.data.office_files import docx, epub, odt, paragraph, xlsx

TABLE = f"<w:tbl><w:tr><w:tc>{paragraph('Bergen')}</w:tc><w:tc>{paragraph('431')}</w:tc></w:tr></w:tbl>"
SUBJECT = b"Subject: =?utf-8?q?Caf=C3=A9_list?=\n"
MAIL = b"From: Ann <a@x.org>\n" + SUBJECT + b"Content-Type: text/html; charset=latin-1\n\n<p>p\xe5</p>"
NOTEBOOK = {"cells": [{"source": ["# Tides\n", "x"]}, {"source": "1+1", "outputs": [{"data": {"text/plain": "2"}}]}]}
KINDS: dict[str, tuple[bytes, str, str]] = {
    ".csv": (b"city;tons\nOslo;3\n\n;4\n", "", "city: Oslo | tons: 3\ntons: 4"),
    ".tsv": (b"1\t2\n3\t4\n", "", "1 | 2\n3 | 4"),
    ".json": (
        b'{"a": {"b": "caf\\u00e9", "c": [1, 2]}, "d": [{"e": 5}]}',
        "",
        "a.b: café\na.c: 1, 2\nd.e: 5",
    ),
    ".jsonl": (b'{"a": 1}\n\n"x"\n', "", "a: 1\n\nx"),
    ".ipynb": (json.dumps(NOTEBOOK).encode(), "Tides", "# Tides\nx\n\n1+1\n\n2"),
    ".eml": (MAIL, "Café list", "From: Ann <a@x.org>\nSubject: Café list\n\npå"),
    ".xhtml": (b"<title>T</title><table><tr><td>a</td><td>b</td></tr></table>", "T", "a | b"),
    ".xml": (b"<?xml version='1.0' encoding='latin-1'?><a b='c'>\xe5&amp;<!-- x -->\n<d>e</d></a>", "", "å&\ne"),
    ".org": (b"#+TITLE: Plan\n* x", "Plan", "#+TITLE: Plan\n* x"),
    ".tex": (b"\\title{On ice}", "On ice", "\\title{On ice}"),
    ".markdown": (b"# One", "One", "# One"),
    ".yaml": (b"a: 1", "", "a: 1"),
    ".py": (b"x = 1", "", "x = 1"),
    ".docx": (docx(paragraph("R&amp;D of caf\u00e9s &lt;5") + TABLE), "", "R&D of cafés <5\nBergen | 431"),
    ".xlsx": (xlsx(Staff=[["Name", "Phone"], ["Ingrid", "55"]]), "Staff", "Staff\nName: Ingrid | Phone: 55"),
    ".epub": (epub("Heron &amp; owl"), "The Lighthouse", "Heron & owl"),
    ".odt": (odt("Puffin &amp; auk"), "", "Puffin & auk"),
    ".rtf": (rb"{\rtf1\ansi\ansicpg1252 The caf\'e9 \u27700?\par}", "", "The café 水"),
}


@pytest.mark.parametrize("ending", KINDS)
def test_a_file_of_each_kind_becomes_text_with_its_title(ending: str) -> None:
    data, title, text = KINDS[ending]
    found = read_file(ending, data)
    assert (found.title, "\n\n".join(section for _, section in found.sections).strip(), found.notice) == (
        title,
        text,
        "",
    )


def text_of(ending: str, data: bytes) -> str:
    """What a file without sections holds."""
    ((_, text),) = read_file(ending, data).sections
    return text


TABLES = {
    'a,b,c\n1,x\u2028y\x0bz,3\n4,"p\nq",6\n': "a: 1 | b: x y z | c: 3\na: 4 | b: p q | c: 6",
    'name\tsize\nbolt\t"5 inch\nnut\t"6 inch\n': 'name: bolt | size: "5 inch\nname: nut | size: "6 inch',
    "name, first, last\tage\nAnn\t3\n": "name, first, last: Ann | age: 3",
    '"a, b, c";"d"\n1;2\n': "a, b, c: 1 | d: 2",
}


@pytest.mark.parametrize("table", TABLES)
def test_rows_and_columns_of_a_table_stay_what_they_are(table: str) -> None:
    assert text_of(".csv", table.encode()) == TABLES[table]


def test_a_table_or_value_whose_names_would_make_it_too_large_is_read_without_them() -> None:
    head = ",".join(f"{'x' * 60}{column}" for column in "abc")
    assert text_of(".csv", f"{head}\n".encode() + b"1,2,3\n" * 100_000).endswith("\n1 | 2 | 3")
    places = b"[" + b"[1,2]," * 600_000 + b"[3,4]]"
    assert text_of(".json", b'{"%s": %s}' % (b"x" * 60, places)).startswith("{")


def test_the_limit_of_fields_of_other_readers_of_tables_stays() -> None:
    before = csv.field_size_limit()
    assert text_of(".csv", b"a,b\n1,2\n") == "a: 1 | b: 2"
    assert csv.field_size_limit() == before


def test_what_programs_write_that_is_no_strict_json_is_read() -> None:
    assert text_of(".json", b'{"a": NaN, "b": "caf\\u00e9 \\ud83d", "c": 1.10}') == "a: NaN\nb: café ?\nc: 1.10"
    cells = [{"source": ["# Tides"]}, {"input": "1/0", "outputs": [{"text": ["2\n"]}, {"evalue": "by zero"}]}]
    old = b"\xef\xbb\xbf" + json.dumps({"worksheets": [{"cells": cells}]}).encode()
    assert text_of(".ipynb", old) == "# Tides\n\n1/0\n\n2\n\n\nby zero"


def test_what_tags_say_and_words_in_several_tags_are_kept() -> None:
    assert text_of(".opml", b"<body><outline text='About owls &amp; auks' xmlUrl='u'/></body>") == "About owls & auks"
    assert text_of(".fb2", b"<p>Water is <strong>H<sub>2</sub>O</strong>.</p><p>x</p>") == "Water is H2O.\nx"


def test_a_page_or_picture_with_the_name_of_an_office_document_is_known_as_such() -> None:
    assert text_of(".xls", b"\n<HTML><table><tr><td>a<td>b</table>") == "a | b"
    with pytest.raises(Unreadable, match="not what its name says"):
        read_file(".docx", b"\xff\xd8\xff\xe0\0\1\2")


def test_headings_of_long_lines_are_looked_for_in_linear_time() -> None:
    with hostile.ends():
        read_file(".rst", b"a" + b" " * 1_000_000 + b"b\nc")


def read(path: Path, **options: bool) -> tuple[dict[str, str], list[str]]:
    """The texts of the documents below a folder by id, and what is told of the rest."""
    source = open_source(str(path), leave_out=True, **options)
    texts = {document.doc_id: document.text for document in source.documents()}
    return texts, [*source.problems, *source.reading.lines()]


def test_what_nothing_reads_is_counted_by_kind_and_refused_if_asked(tmp_path: Path) -> None:
    for name in ("a.heic", "b.HEIC", "c.bin", "d"):
        (tmp_path / name).write_bytes(b"\0\1\2")
    with pytest.raises(CorpusError, match=r"no documents; 4 files of 3 kinds were not read \(\.heic 2, \.bin 1, no"):
        read(tmp_path)
    (tmp_path / "z.txt").write_text("kept")
    assert read(tmp_path) == ({"z.txt": "kept"}, ["4 files of 3 kinds were not read (.heic 2, .bin 1, no ending 1)"])
    with pytest.raises(CorpusError, match="4 files of 3 kinds were not read"):
        list(open_source(str(tmp_path), leave_out=False).documents())


def test_files_that_need_the_extra_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.data.folder.missing", lambda form: bool(form.needs))
    (tmp_path / "a.docx").write_bytes(docx(paragraph("x")))
    (tmp_path / "b.txt").write_text("kept")
    needed = "pip install 'harness1[documents]' reads .docx"
    assert read(tmp_path)[1] == ["1 file of 1 kind was not read (.docx 1)", needed]


def test_one_file_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    (tmp_path / "b.txt").write_text("not this one")
    assert list(read(tmp_path / "a.csv")[0]) == ["a.csv"]


def test_what_is_built_hidden_or_ignored_is_passed_over_and_named(tmp_path: Path) -> None:
    files = ["a.txt", "node_modules/b.txt", "env/pyvenv.cfg", "env/c.txt", "logs/d.log", "logs/keep.log", ".e.txt"]
    for name in (*files, "sub/f.tmp", ".git/g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text(f"*.log\n!keep.log\n[z-a]\n{'a*' * 400}b\n")
    (tmp_path / "sub" / ".gitignore").write_text("/*.tmp\n")
    documents, said = read(tmp_path)
    assert list(documents) == ["a.txt", "logs/keep.log"]
    passed = [".e.txt", ".git/", ".gitignore", "env/", "logs/d.log", "node_modules/", "sub/.gitignore", "sub/f.tmp"]
    assert open_source(str(tmp_path)).reading.skipped == []
    source = open_source(str(tmp_path))
    list(source.documents())
    assert sorted(source.reading.skipped) == passed
    assert said[0].startswith("8 passed over: ")
    assert {*files, "sub/f.tmp"} <= {*read(tmp_path, everything=True)[0]}


def test_thousands_of_rules_are_followed_and_the_last_one_that_fits_decides(tmp_path: Path) -> None:
    rules = [f"*{number}*z?" for number in range(9_000)]
    (tmp_path / ".gitignore").write_text("\n".join(["*.md", "kept.txt", *rules, "!kept.md", "[z-a]", "left.txt"]))
    for name in ("kept.md", "left.md", "kept.txt", "left.txt", "other.txt", "a17zz"):
        (tmp_path / name).write_text(name)
    assert [*read(tmp_path)[0]] == ["kept.md", "other.txt"]


def test_files_with_one_text_are_one_document(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text("the same")
    documents, said = read(tmp_path)
    assert list(documents) == ["a.txt"]
    assert said == ["2 files with the text of another: b.txt is a.txt, c.md is a.txt"]


def test_a_page_and_its_source_beside_it_are_one_document_and_others_are_not(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(50))
    (tmp_path / "a.html").write_text(f"<p>Next Back</p><h1>Tour</h1><p>{words}</p>")
    (tmp_path / "a.rst").write_text(f"Tour\n====\n\n.. note::\n\n   {words}\n")
    (tmp_path / "b.html").write_text(f"<p>{words} and more</p>")
    (tmp_path / "b.md").write_text(words + " and more than that page says: what follows, too, is a part of it")
    (tmp_path / "c.html").write_text("<p>Something else altogether</p>")
    (tmp_path / "c.md").write_text("Not the same thing")
    documents, said = read(tmp_path)
    assert list(documents) == ["a.html", "b.html", "b.md", "c.html", "c.md"]
    assert said == ["1 file with the text of another: a.rst is a.html"]


def test_files_whose_names_differ_in_case_alone_are_compared_with_few_others() -> None:
    stems = ["".join(each) for each in product(*(f"{letter}{letter.upper()}" for letter in "abcdefghijkl"))]
    names = [f"{stem}{ending}" for stem in stems for ending in (".md", ".html")]
    texts = folder._Texts(names)
    with hostile.ends():
        for number, name in enumerate(names):
            text = " ".join(f"w{number + at}" for at in range(0, 30_000, 50))
            assert texts.first_with(name, text) == name


PRINTED = "The photo-\nsynthesis of a well-\nknown plant. Well-known is photo-\nsynthesis; not of post-\nWar years."


def test_words_hyphenated_over_a_line_end_are_joined_and_stay_findable_as_printed() -> None:
    ((_, text),) = read_file(".txt", PRINTED.encode()).sections
    assert text == (
        "The photosynthesis (photo-synthesis) of a well-known plant. Well-known is photosynthesis (photo-synthesis);"
        " not of post-War years."
    )
    assert text_of(".txt", "exam\u00ad\r\nple, ex\u00adam".encode()) == "example, exam"
    assert read_file(".txt", (PRINTED + " Photosynthesis.").encode()).sections[0][1].startswith("The photosynthesis of")
    with hostile.ends():
        read_file(".txt", b"a" * 4_000_000 + b"-")


def locked(*pages: bytes, owner: str = "owner", user: str = "") -> bytes:
    """A PDF that only its owner may change, or, with a password for users, read."""
    writer, out = pypdf.PdfWriter(), io.BytesIO()
    for page in pages:
        writer.append(io.BytesIO(hostile.page(page)))
    writer.encrypt(user, owner, algorithm="AES-256")
    writer.write(out)
    return out.getvalue()


def test_a_pdf_that_is_locked_against_changes_is_read_and_one_with_a_password_is_not() -> None:
    shown = [b"BT /F1 12 Tf 20 200 Td (%s) Tj ET" % word for word in (b"first", b"", b"third")]
    assert read_file(".pdf", locked(*shown)).sections == [("page=1", "first"), ("page=3", "third")]
    with pytest.raises(Unreadable, match="broken or locked PDF"):
        read_file(".pdf", locked(*shown, user="secret"))


def test_a_pdf_of_pictures_names_what_makes_text_of_them(tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(hostile.page(b"0 0 9 9 re f"))
    (tmp_path / "z.txt").write_text("kept")
    (said,) = read(tmp_path)[1]
    assert said.startswith("scan.pdf: its pages have no text: if they are pictures, ocrmypdf IN.pdf OUT.pdf makes one")


ENCODED = [
    ("utf-16", "Straße nach Köln"),
    ("utf-8-sig", "Straße"),
    ("utf-16-le", "no mark at all, in two bytes"),
    ("cp1252", "Le garçon a mangé une crêpe à la forêt où il était né."),
    ("cp1251", "Съешь ещё этих мягких французских булок, да выпей чаю."),
    ("shift_jis", "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"),
    ("shift_jis", "冷却塔の水質を調べた結果、問題はなかった。"),
    ("gb18030", "本月新员工有 7 名，培训安排在下周。"),
    ("cp1250", "Pompa P-311 w Łódź została sprawdzona."),
    ("euc_kr", "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다."),
]


@pytest.mark.parametrize(("encoding", "text"), ENCODED, ids=[name for name, _ in ENCODED])
def test_a_text_of_any_encoding_is_read(tmp_path: Path, encoding: str, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    documents, said = read(tmp_path)
    assert documents == {"a.txt": text}
    assert all("which is a guess" in line for line in said)
    assert bool(said) is not encoding.startswith("utf")


def test_a_text_in_utf_8_with_a_broken_byte_is_no_other_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Съешь ещё этих булок".encode() + b" \xd0")
    documents, said = read(tmp_path)
    assert documents == {"a.txt": "Съешь ещё этих булок \ufffd"}
    assert said == ["a.txt: not utf-8 throughout (byte 38)"]


@pytest.mark.parametrize("before", ["", "a"])
def test_the_encoding_of_a_long_text_is_found_wherever_its_beginning_ends(before: str) -> None:
    text = before + "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n" * 4_000
    assert text_of(".txt", text.encode("cp932")) == text


def test_a_page_is_read_as_it_declares(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes('<meta charset="iso-8859-2"><p>Zażółć</p>'.encode("iso-8859-2"))
    assert read(tmp_path) == ({"a.html": "Zażółć"}, [])


def test_pages_of_a_pdf_and_sheets_are_chunks_with_their_name(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(hostile.page(b"BT /F1 12 Tf 20 200 Td (Hello) Tj ET"))
    long = [["Part", "Price"], *([f"bolt {at}", f"{at}.5"] for at in range(200))]
    (tmp_path / "b.xlsx").write_bytes(xlsx(Staff=[["Ann"]], Parts=long))
    pdf, book = open_source(str(tmp_path)).documents()
    assert [chunk.chunk_id for chunk in pdf.chunks] == ["a.pdf#page=1"]
    assert [chunk.chunk_id for chunk in book.chunks[:3]] == [
        f"b.xlsx#sheet={n}" for n in ("Staff", "Parts", "Parts&part=2")
    ]
    texts = [book.text[chunk.start : chunk.end] for chunk in book.chunks]
    assert all(line.startswith("Part: bolt ") for line in "\n".join(texts[2:]).splitlines())
    assert "\n".join(texts) == book.text.replace("\n\n", "\n")


def test_a_mailbox_has_a_section_for_each_message() -> None:
    box = (
        b"From a@x Mon Mar  2 10:00:00 2020\nSubject: one\n\nFrom 2024 on\n\nFrom b@x Mon Mar  2 10:00:00 2020\n\ntwo\n"
    )
    found = read_file(".mbox", box)
    assert found.sections == [("message=1", "Subject: one\n\nFrom 2024 on\n\n"), ("message=2", "\ntwo\n")]


def test_what_is_attached_to_a_message_is_read_too() -> None:
    message = EmailMessage()
    message["Subject"] = "Parts"
    message.set_content("See the table.")
    message.add_attachment(xlsx(Staff=[["Ann", "x"]]), maintype="application", subtype="x", filename="b.xlsx")
    message.add_attachment(b"\0\1", maintype="image", subtype="heic", filename="c.heic")
    inner = EmailMessage()
    inner["Subject"] = "inner"
    message.add_attachment(inner)
    found = read_file(".eml", message.as_bytes())
    names = "Attached: b.xlsx\nAttached: c.heic\nAttached: message.eml"
    assert found.sections == [
        ("", f"Subject: Parts\n{names}\n\nSee the table.\n"),
        ("attached=b.xlsx&sheet=Staff", "Staff\nAnn | x"),
        ("attached=message.eml", "Subject: inner\n"),
    ]


def parts(kind: str, *contents: str) -> str:
    """A part of a message that holds others, each with its headers."""
    mark = f"b{len(''.join(contents))}"
    inner = "".join(f"--{mark}\nContent-Type: {content}\n" for content in contents)
    return f"multipart/{kind}; boundary={mark}\n\n{inner}--{mark}--\n"


TSV = "text/tab-separated-values; name=a.tsv\n\n1\t2\n"
LETTERS = {
    "attached within a choice": (
        parts("alternative", "text/plain\n\nplain", parts("mixed", "text/html\n\n<p>page</p>", TSV)),
        ["Attached: a.tsv\n\nplain", "1 | 2"],
    ),
    "signed": (
        parts("signed", parts("mixed", "text/plain\n\nplain", TSV), "application/pgp-signature\n\nx"),
        ["Attached: a.tsv\n\nplain", "1 | 2"],
    ),
    "several texts": (
        parts("mixed", "text/plain\n\none", "text/plain\n\ntwo", "text/html\n\n<p>three</p>"),
        ["\none\ntwo\nthree"],
    ),
    "a choice": (parts("alternative", "text/plain\n\nplain", "text/html\n\n<p>page</p>"), ["\nplain"]),
    "an empty plain text": (parts("alternative", "text/plain\n\n \n", "text/html\n\n<p>page</p>"), ["\npage"]),
}


@pytest.mark.parametrize("kind", LETTERS)
def test_all_texts_and_attachments_of_a_message_are_read_once(kind: str) -> None:
    letter, texts = LETTERS[kind]
    assert [text for _, text in read_file(".eml", f"Content-Type: {letter}".encode()).sections] == texts


def test_a_guessed_encoding_of_a_message_is_told() -> None:
    letter = b"Content-Type: text/plain; charset=x-none\n\nSm\xf8rrebr\xf8d og \xf8l"
    assert read_file(".eml", letter).notice.endswith("which is a guess")
    box = b"From a@x Mon Mar  2 10:00:00 2020\n" + letter
    assert read_file(".mbox", box).notice.startswith("1 message, the first: ")


def test_the_notices_of_a_message_are_counted_and_one_is_told() -> None:
    letter = parts("mixed", *["text/plain; charset=x-none\n\ncaf\xe9"] * 2)
    assert read_file(".eml", f"Content-Type: {letter}".encode("latin-1")).notice.startswith("2 parts, the first: ")


def test_the_names_of_attachments_count_as_text_each_time_they_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "TEXT_BYTES", 700)
    letter = parts("mixed", *(f"text/plain; name={letter * 100}.txt\n\nx" for letter in "abcd"))
    with pytest.raises(Unreadable, match="its text has more than 700 characters"):
        read_file(".eml", f"Content-Type: {letter}".encode())


def test_many_attachments_of_one_name_take_linear_time(tmp_path: Path) -> None:
    contents = Contents("", [("attached=a.txt", f"text {number}") for number in range(30_000)])
    with hostile.ends():
        ids = [chunk.chunk_id for chunk in folder._chunks("m.eml", contents)]
    assert [ids[0], ids[1], ids[-1]] == [f"m.eml#attached=a.txt{part}" for part in ("", "&part=2", "&part=30000")]
    assert len({*ids}) == len(ids)


def test_a_message_with_headers_in_no_encoding_is_read() -> None:
    found = read_file(".eml", b"Subject: p\xe5\nContent-Disposition: attachment\n\nb\xe5d")
    json.dumps(found).encode()
    assert found.sections[0][1].endswith("båd")


def heic(data: bytes) -> tuple[str, str]:
    """A reader of a plugin."""
    return "picture", data.decode()


def test_a_plugin_reads_a_further_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_plugin("readers", ".heic") is None
    monkeypatch.setattr("harness1.data.formats.plugin_names", lambda kind: (".heic",))
    monkeypatch.setattr("harness1.data.formats.find_plugin", lambda kind, name, built_in: heic)
    assert read_file(".heic", b"seen")[:2] == ("picture", [("", "seen")])


@pytest.mark.parametrize("ending", [".docx", ".xlsx", ".odt", ".epub"])
def test_a_bomb_or_half_a_file_is_left_out_alone(tmp_path: Path, ending: str) -> None:
    bombs = {".docx": lambda: docx(paragraph("x" * 70_000_000)), ".odt": lambda: odt("x" * 40_000_000)}
    (tmp_path / f"a{ending}").write_bytes(bombs.get(ending, lambda: b"PK\3\4" * 1000)())
    (tmp_path / f"b{ending}").write_bytes(KINDS[ending][0][:200])
    (tmp_path / "z.txt").write_text("kept")
    with hostile.ends():
        documents, said = read(tmp_path)
    assert list(documents) == ["z.txt"]
    assert len(said) == 2
