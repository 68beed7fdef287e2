"""Corpora in every layout, and the documentation of the standard library of Python under public names."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness1.data import beir
from harness1.data.open import open_source, stdlib_source
from harness1.data.source import Source
from harness1.data.tables import read_documents
from harness1.errors import CorpusError, UsageError
from harness1.records import ChunkId, DocId, Gold, Task
from harness1.retrieval.corpus import Document

DOCUMENT = Document(doc_id=DocId("a"), title="T", text="x")
TASK = Task(task_id="q", query="Q", split="dev", gold=Gold(relevant={DocId("a"): 1}))


def test_a_beir_folder_has_documents_and_tasks_and_a_jsonl_file_documents_only(tmp_path) -> None:
    beir.write(tmp_path / "set", [DOCUMENT], [TASK])
    source = open_source(str(tmp_path / "set"))
    assert (source.name, source.kind, source.splits) == ("set", "beir", ("dev",))
    assert list(source.documents()) == list(source.documents()) == [DOCUMENT]
    assert source.tasks("dev") == [TASK]
    with pytest.raises(UsageError, match="no split 'test'; it has: dev"):
        source.tasks("test")
    path = tmp_path / "docs.jsonl"
    path.write_text('{"id": "a", "title": "T", "text": "x"}\n')
    source = open_source(str(path))
    assert (source.kind, source.splits, list(source.documents())) == ("jsonl", (), [DOCUMENT])
    with pytest.raises(UsageError, match="has documents, but no questions whose evidence is known"):
        source.tasks("test")


def test_problems_are_those_of_the_last_pass(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text(" ")
    source = open_source(str(tmp_path))
    assert source.kind == "folder"
    for _ in range(2):
        assert [document.doc_id for document in source.documents()] == ["a.txt"]
        assert source.problems == ["b.txt: no text in it"]


def test_what_is_no_corpus_or_has_no_documents_is_refused(tmp_path) -> None:
    (tmp_path / "docs.jsonl").write_text("\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ")
    for name, error, says in (
        ("absent", UsageError, "no such file or folder"),
        ("pipe", UsageError, "neither a folder nor a regular file"),
        ("empty", CorpusError, "holds no files"),
        ("docs.jsonl", CorpusError, r"docs\.jsonl holds no documents"),
        ("texts", CorpusError, r"holds no documents; a\.txt: no text in it"),
    ):
        with pytest.raises(error, match=says):
            list(open_source(str(tmp_path / name)).documents())


@pytest.fixture(scope="module")
def source() -> Source:
    return stdlib_source()


@pytest.fixture(scope="module")
def documents(source: Source) -> dict[str, Document]:
    return {document.doc_id: document for document in source.documents()}


def test_a_public_name_leads_to_its_docstring(documents: dict[str, Document]) -> None:
    said = {
        "json.dumps": "(obj, *, skipkeys=False",
        "math.sqrt": "square root of x",
        "collections.deque.append": "right side of the deque",
        "decimal.Decimal": "new Decimal object",
        "os.unlink": "Remove a file",
        "os.path.join": "Join two or more",
        "asyncio.run": "Execute the coroutine",
        "pathlib.Path.rglob": "Recursively yield",
        "json": "JSON",
    }
    assert [name for name, words in said.items() if words not in documents[name].text] == []


def test_thousands_of_documents_have_public_names_and_the_same_text_in_every_process(
    documents: dict[str, Document],
) -> None:
    assert len(documents) > 2000
    assert list(documents) == sorted(documents)
    for name, document in documents.items():
        assert document.text.startswith(name)
        assert document.title.startswith(name)
        assert not any(part.startswith("_") for part in name.split("."))
        assert " at 0x" not in document.text.partition("\n")[0]


def test_reading_it_prints_nothing_and_opens_no_window() -> None:
    script = "import sys; from harness1.data.open import stdlib_source; stdlib_source(); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
    assert run.stdout.count("\n") == 1
    assert {"tkinter", "turtle", "antigravity", "this", "idlelib"}.isdisjoint(run.stdout.split())


def test_every_demo_task_needs_several_documents_that_are_there(source: Source, documents: dict[str, Document]) -> None:
    tasks = source.tasks("demo")
    assert [task.task_id for task in tasks] == [f"demo-{number}" for number in range(1, 9)]
    for task in tasks:
        assert 2 <= len(task.gold.relevant) <= 4
        assert task.gold.relevant.keys() <= documents.keys()
    with pytest.raises(UsageError, match="demo"):
        source.tasks("test")


DOCUMENTS = [Document(DocId(name), name.upper(), f"About {name}.") for name in ("a", "b#1", "c d")]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ID = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=8)
FACT = st.lists(ID.map(ChunkId), max_size=2).map(tuple)
GOLD = st.builds(
    Gold,
    relevant=st.dictionaries(ID.map(DocId), st.integers(1, 3), min_size=1, max_size=3),
    answer_docs=st.lists(ID.map(DocId), max_size=2).map(tuple),
    facts=st.none() | st.lists(FACT, max_size=3).map(tuple),
    answer_facts=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    answers=st.lists(TEXT, max_size=3).map(tuple),
)
METADATA = st.dictionaries(
    st.sampled_from(["type", "level", "hops"]), st.integers() | TEXT | st.lists(TEXT, max_size=2)
)
TASKS = st.builds(Task, ID, TEXT.filter(str.strip), st.sampled_from(["train", "test"]), GOLD, METADATA)


def write_files(folder, queries: list[dict], qrels: str) -> None:
    (folder / "qrels").mkdir()
    (folder / "corpus.jsonl").write_text('{"_id": "a", "title": "T", "text": "x"}\n')
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    (folder / "qrels" / "test.tsv").write_text(qrels)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TASKS, max_size=5, unique_by=lambda task: task.task_id))
def test_a_round_trip_is_equal(tmp_path_factory, tasks) -> None:
    folder = tmp_path_factory.mktemp("beir")
    beir.write(folder, DOCUMENTS, tasks)
    assert list(open_source(str(folder)).documents()) == DOCUMENTS
    assert beir.splits(folder) == tuple(sorted({task.split for task in tasks}))
    for split in beir.splits(folder):
        assert beir.read_tasks(folder, split) == [task for task in tasks if task.split == split]


def test_evidence_in_the_metadata_becomes_gold(tmp_path) -> None:
    metadata = {"answer": "yes", "answer_aliases": ["aye"], "answer_docs": ["b"], "type": "bridge"}
    metadata |= {"facts": [["a#0", "a#1"], ["b"]], "answer_facts": [1]}
    write_files(tmp_path, [{"_id": "q", "text": "Q?", "metadata": metadata}], "query-id\tcorpus-id\tscore\nq\ta\t2\n")
    gold = Gold({DocId("a"): 2}, ("b",), (("a#0", "a#1"), ("b",)), answer_facts=(1,), answers=("yes", "aye"))
    assert beir.read_tasks(tmp_path, "test") == [Task("q", "Q?", "test", gold, {"type": "bridge"})]


def test_tasks_follow_the_query_file_and_need_a_relevant_document(tmp_path) -> None:
    queries = [{"_id": name, "text": name} for name in ("q3", "q1", "unjudged", "q2", "nothing")]
    rows = ["query-id\tcorpus-id\tscore", "q1\ta\t1", "q2\ta\t1", "q3\tb\t1", "q3\tc\t0", "nothing\ta\t0", ""]
    write_files(tmp_path, queries, "\n".join(rows))
    tasks = beir.read_tasks(tmp_path, "test")
    assert [task.task_id for task in tasks] == ["q3", "q1", "q2"]
    assert tasks[0].gold == Gold(relevant={DocId("b"): 1})


def test_judgements_need_no_header_and_may_be_gzipped(tmp_path) -> None:
    write_files(tmp_path, [{"_id": "q", "text": "Q"}], "")
    (tmp_path / "qrels" / "test.tsv").unlink()
    (tmp_path / "qrels" / "dev.tsv.gz").write_bytes(gzip.compress(b"q\ta\t1\r\n"))
    assert beir.splits(tmp_path) == ("dev",)
    assert [task.gold for task in beir.read_tasks(tmp_path, "dev")] == [Gold(relevant={DocId("a"): 1})]


@pytest.mark.parametrize(
    ("queries", "qrels", "message"),
    [
        ([], "q\ta\t1\n", "test judges query 'q', which is not in queries.jsonl"),
        ([{"_id": "q", "text": "Q"}], "q a 1\n", r"test\.tsv:1"),
        ([{"_id": "q", "text": "Q"}], "q\ta\t1\nq\ta\t1\nq\ta\t0\n", r"test\.tsv:3: 'a' was given another grade"),
        ([{"_id": "q", "text": "Q"}], "q\ta\tmuch\n", r"test\.tsv:1"),
        ([{"_id": "q", "text": "Q"}], "q\ta\t1\x1e\n", r"test\.tsv:1"),
        ([{"_id": "q"}], "q\ta\t1\n", r"queries\.jsonl:1: query 'q' needs a text"),
        ([{"_id": "q", "text": "Q"}] * 2, "q\ta\t1\n", r"queries\.jsonl:2: .*second time"),
        ([{"_id": "q", "text": "Q", "metadata": {"facts": "x"}}], "q\ta\t1\n", r"queries\.jsonl:1: metadata.*facts"),
    ],
)
def test_broken_tasks_are_named(tmp_path, queries, qrels: str, message: str) -> None:
    write_files(tmp_path, queries, qrels)
    with pytest.raises(CorpusError, match=message):
        beir.read_tasks(tmp_path, "test")


def test_a_missing_split_or_file_is_named(tmp_path) -> None:
    write_files(tmp_path, [], "")
    with pytest.raises(CorpusError, match="no split 'dev'; it has: test"):
        beir.read_tasks(tmp_path, "dev")
    (tmp_path / "queries.jsonl").unlink()
    with pytest.raises(CorpusError, match=r"has no queries\.jsonl"):
        beir.read_tasks(tmp_path, "test")


def test_an_id_that_would_break_the_table_is_refused(tmp_path) -> None:
    for task_id, doc_id in (("q", "a\tb"), ("q\n", "a")):
        with pytest.raises(CorpusError, match="holds a tab"):
            beir.write(tmp_path, [], [Task(task_id, "Q", gold=Gold({DocId(doc_id): 1}))])
    beir.write(tmp_path, [], [Task("q\t", "Q", gold=Gold({}))])  # no table names it


def test_the_usual_keys_are_understood_and_documents_come_one_by_one(tmp_path) -> None:
    lines = (
        '{"_id": "a#1", "title": "T", "text": "x", "metadata": {"k": 1}}\r\n'
        '{"id": "b", "contents": "y"}\n\n{"doc_id": 7, "title": null, "content": "zä"}\nnot json'
    )
    (path := tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    documents = read_documents(path)
    found = [next(documents) for _ in range(3)]
    assert found == [Document("a#1", "T", "x"), Document("b", "", "y"), Document("7", "", "zä")]
    with pytest.raises(CorpusError, match=r"docs\.jsonl\.gz:5: not a JSON object"):
        next(documents)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorpusError, match="cannot read"):
        list(read_documents(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b", "text": ', "not a JSON object"),
        ('["id", "b"]', "not a JSON object"),
        ('{"id": "b", "text": "\\ud800"}', "not a JSON object"),
        ('{"text": "no id"}', "needs an id"),
        ('{"id": "", "text": "x"}', "needs an id"),
        ('{"id": true, "text": "x"}', "needs an id"),
        ('{"id": "b", "title": "T"}', "needs a text"),
        ('{"id": "b", "title": "T", "text": null}', "needs a text"),
        ('{"id": "b", "text": 3}', "needs a text"),
        ('{"id": "b", "title": 3, "text": "x"}', "title of document 'b' is not text"),
        ('{"id": "b", "title": " ", "text": ""}', "neither title nor text"),
        ('{"id": "a", "text": "again"}', "'a' occurs a second time"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"id": "a", "title": "only a title", "text": ""}\n' + line + "\n")
    with pytest.raises(CorpusError, match=rf"docs\.jsonl:2: .*{message}"):
        list(read_documents(path))
