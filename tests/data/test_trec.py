import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness1.data.open import open_source
from harness1.data.source import DuplicateId, EmptyText
from harness1.data.trec import read_qrels, write_run
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId, Gold, Task, UnitId
from harness1.retrieval.corpus import Document
from tests.support import read_run

ID = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=6).filter(
    lambda name: name.split() == [name]
)
UNITS = st.lists(st.tuples(ID.map(UnitId), st.floats(allow_nan=False)), min_size=1, max_size=4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(ID, UNITS, max_size=4))
def test_a_run_comes_back_equal(tmp_path, run) -> None:
    write_run(tmp_path / "run", run.items(), "tag")
    assert read_run(tmp_path / "run") == list(run.items())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(ID, st.dictionaries(ID.map(UnitId), st.integers(0, 3), min_size=1, max_size=3), max_size=4))
def test_documents_with_a_grade_are_relevant(tmp_path, qrels) -> None:
    lines = (f"{name} 0 {unit} {grade}\n" for name, grades in qrels.items() for unit, grade in grades.items())
    (tmp_path / "qrels").write_text("".join(lines), encoding="utf-8")
    positive = {name: {unit: grade for unit, grade in grades.items() if grade} for name, grades in qrels.items()}
    assert read_qrels(tmp_path / "qrels", qrels, "tasks") == {name: units for name, units in positive.items() if units}


def test_lines_are_those_of_trec_eval(tmp_path) -> None:
    write_run(tmp_path / "run", [("q1", [(UnitId("b#1"), 2.5), (UnitId("a"), 1.0)])], "harness1")
    assert (tmp_path / "run").read_text() == "q1 Q0 b#1 1 2.5 harness1\nq1 Q0 a 2 1.0 harness1\n"


@pytest.mark.parametrize("name", ["my file.md", "", "tab\there", "line\n"])
def test_ids_with_white_space_are_refused(tmp_path, name: str) -> None:
    with pytest.raises(UsageError, match="white space"):
        write_run(tmp_path / "run", [("q", [(UnitId(name), 1.0)])], "tag")


def test_broken_lines_are_named(tmp_path) -> None:
    with pytest.raises(CorpusError, match="cannot read"):
        read_qrels(tmp_path / "qrels", "q", "tasks")
    for line, says in (("q Q0 a 1 0.5 t", "6 columns where 4 are expected"), ("q 0 a high", "grade must be a whole")):
        (tmp_path / "qrels").write_text(f"q 0 b 1\n{line}\n")
        with pytest.raises(CorpusError, match=f"qrels:2: .*{says}"):
            read_qrels(tmp_path / "qrels", "q", "tasks")


DOCS = (
    "<DOC>\n<DOCNO> FT-1 </DOCNO>\n<HEADLINE>Rivers of\n Alpha</HEADLINE>\n<DATE>1992</DATE>\n"
    "<TEXT>\n<P>The Beta flows</P> through Alpha.\n</TEXT>\n</DOC>\n"
    "<DOC>\n<DOCNO>FT-2</DOCNO>\nPlain words alone.\n</DOC>\n"
)
TOPICS = (
    "<top>\n<num> Number: 301\n<title> Rivers of Alpha\n\n<desc> Description:\nWhich rivers?\n</top>\n"
    "<top>\n<num>302</num><title>Plain words</title>\n</top>\n"
)


def make(folder: Path, topics: str = TOPICS) -> Path:
    for name, text in (("docs.trec", DOCS), ("topics.txt", topics), ("qrels.txt", "301 0 FT-1 2\n301 0 FT-2 0\n")):
        (folder / name).write_text(text)
    return folder


def test_a_folder_of_documents_topics_and_judgements_is_a_benchmark(tmp_path: Path) -> None:
    source = open_source(str(make(tmp_path)))
    assert (source.kind, source.splits) == ("trec", ("test",))
    assert list(source.documents()) == [
        Document(doc_id=DocId("FT-1"), title="Rivers of Alpha", text="The Beta flows  through Alpha."),
        Document(doc_id=DocId("FT-2"), title="", text="Plain words alone."),
    ]
    assert source.tasks("test") == [
        Task(task_id="301", query="Rivers of Alpha", gold=Gold(relevant={DocId("FT-1"): 2}))
    ]


def test_tab_separated_topics_json_lines_and_splits(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"id": "a", "contents": "x"}\n'))
    (tmp_path / "topics.tsv").write_bytes(b'\xef\xbb\xbf1\tFirst "one"?\r\n2\tSecond?\r\n')
    (tmp_path / "qrels.dev.txt").write_bytes(b"1 0 a 1\r\n")
    (tmp_path / "qrels.test.txt").write_text("2 0 a 1\n")
    source = open_source(str(tmp_path))
    assert (source.kind, source.splits) == ("trec", ("dev", "test"))
    assert [task.query for split in source.splits for task in source.tasks(split)] == ['First "one"?', "Second?"]
    assert [document.doc_id for document in source.documents()] == ["a"]


@pytest.mark.parametrize(
    ("file", "old", "new", "error", "message"),
    [
        ("docs.trec", "<DOCNO>FT-2</DOCNO>", "", CorpusError, r"docs\.trec:10: a document needs a <DOCNO>"),
        ("docs.trec", "FT-2", "FT-1", DuplicateId, r"docs\.trec:10: the id 'FT-1' occurs a second time"),
        ("docs.trec", "Plain words alone.", "", EmptyText, r"docs\.trec:10: document 'FT-2' has neither"),
        ("docs.trec", "alone.\n</DOC>", "alone.", CorpusError, r"docs\.trec:10: <DOC> without </doc>"),
        ("docs.trec", "</DOC>\n<DOC>", "</DOC>\nstray\n<DOC>", CorpusError, r"docs\.trec:10: text outside of <DOC>"),
        ("topics.txt", "302", "301", DuplicateId, r"topics\.txt:8: the id '301' occurs a second time"),
        ("topics.txt", "<num>302</num>", "", CorpusError, r"topics\.txt:8: a topic needs <num> and <title>"),
        ("qrels.txt", "301 0 FT-1 2", "301 0 FT-1", CorpusError, r"qrels\.txt:1: 3 columns where 4"),
        ("qrels.txt", "301 0", "999 0", CorpusError, r"qrels\.txt:1: query '999' is not among the topics"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, file, old, new, error, message) -> None:
    path = make(tmp_path) / file
    path.write_text(path.read_text().replace(old, new))
    source = open_source(str(tmp_path))
    with pytest.raises(error, match=message):
        list(source.documents()) and source.tasks("test")


def test_broken_topics_between_tabs_and_one_id_in_two_files_are_named(tmp_path: Path) -> None:
    source = open_source(str(make(tmp_path, topics="301\tQ?\n302 Q\n")))
    with pytest.raises(CorpusError, match=r"topics\.txt:2: not `number, question`"):
        source.tasks("test")
    (tmp_path / "more.trec").write_text(DOCS)
    with pytest.raises(DuplicateId, match=r"more\.trec:1: the id 'FT-1' occurs a second time"):
        list(open_source(str(tmp_path)).documents())
