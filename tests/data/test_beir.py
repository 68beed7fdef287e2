import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness1.data import beir, jsonl
from harness1.errors import CorpusError
from harness1.records import ChunkId, DocId, Gold, Task
from harness1.retrieval.corpus import Document

DOCUMENTS = [Document(doc_id=DocId(name), title=name.upper(), text=f"About {name}.") for name in ("a", "b#1", "c d")]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ID = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=8)
GOLD = st.builds(
    Gold,
    relevant=st.dictionaries(ID.map(DocId), st.integers(1, 3), min_size=1, max_size=3),
    answer_docs=st.lists(ID.map(DocId), max_size=2).map(tuple),
    facts=st.none() | st.lists(st.lists(ID.map(ChunkId), max_size=2).map(tuple), max_size=3).map(tuple),
    answer_facts=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    answers=st.lists(TEXT, max_size=3).map(tuple),
)
METADATA = st.dictionaries(
    st.sampled_from(["type", "level", "hops"]), st.integers() | TEXT | st.lists(TEXT, max_size=2)
)
TASKS = st.lists(
    st.builds(
        Task,
        task_id=ID,
        query=TEXT.filter(str.strip),
        split=st.sampled_from(["train", "test"]),
        gold=GOLD,
        metadata=METADATA,
    ),
    max_size=5,
    unique_by=lambda task: task.task_id,
)


def write_files(folder, queries: list[dict], qrels: str) -> None:
    (folder / "qrels").mkdir()
    (folder / "corpus.jsonl").write_text('{"_id": "a", "title": "T", "text": "x"}\n')
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    (folder / "qrels" / "test.tsv").write_text(qrels)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TASKS)
def test_a_round_trip_is_equal(tmp_path_factory, tasks) -> None:
    folder = tmp_path_factory.mktemp("beir")
    beir.write(folder, DOCUMENTS, tasks)
    assert list(beir.read_corpus(folder)) == DOCUMENTS
    assert beir.splits(folder) == tuple(sorted({task.split for task in tasks}))
    for split in beir.splits(folder):
        assert beir.read_tasks(folder, split) == [task for task in tasks if task.split == split]


def test_evidence_in_the_metadata_becomes_gold(tmp_path) -> None:
    metadata = {"answer": "yes", "answer_aliases": ["aye"], "answer_docs": ["b"], "type": "bridge"}
    facts = {"facts": [["a#0", "a#1"], ["b"]], "answer_facts": [1]}
    write_files(
        tmp_path, [{"_id": "q", "text": "Q?", "metadata": metadata | facts}], "query-id\tcorpus-id\tscore\nq\ta\t2\n"
    )
    (task,) = beir.read_tasks(tmp_path, "test")
    assert task == Task(
        task_id="q",
        query="Q?",
        split="test",
        gold=Gold(
            relevant={DocId("a"): 2},
            answer_docs=(DocId("b"),),
            facts=((ChunkId("a#0"), ChunkId("a#1")), (ChunkId("b"),)),
            answer_facts=(1,),
            answers=("yes", "aye"),
        ),
        metadata={"type": "bridge"},
    )


def test_tasks_follow_the_query_file_and_need_a_relevant_document(tmp_path) -> None:
    queries = [{"_id": name, "text": name} for name in ("q3", "q1", "unjudged", "q2", "nothing")]
    write_files(
        tmp_path, queries, "query-id\tcorpus-id\tscore\nq1\ta\t1\nq2\ta\t1\nq3\tb\t1\nq3\tc\t0\nnothing\ta\t0\n"
    )
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
        ([{"_id": "q", "text": "Q"}], "q\ta\tmuch\n", r"test\.tsv:1"),
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
    with pytest.raises(CorpusError, match=r"has no corpus\.jsonl"):
        beir.read_corpus(tmp_path / "qrels")


def test_an_id_that_would_break_the_table_is_refused(tmp_path) -> None:
    task = Task(task_id="q", query="Q", gold=Gold(relevant={DocId("a\tb"): 1}))
    with pytest.raises(CorpusError, match="holds a tab"):
        beir.write(tmp_path, [], [task])


def rows(tmp_path, text: str):
    path = tmp_path / "docs.jsonl"
    path.write_text(text, encoding="utf-8", newline="")
    return [(document.doc_id, document.title, document.text) for document in jsonl.read(path)]


def test_the_usual_keys_are_understood(tmp_path) -> None:
    text = (
        '{"_id": "a#1", "title": "T", "text": "x", "metadata": {"k": 1}}\r\n'
        '{"id": "b", "contents": "y"}\n'
        "\n"
        '{"doc_id": 7, "title": null, "content": "zä"}'
    )
    assert rows(tmp_path, text) == [("a#1", "T", "x"), ("b", "", "y"), ("7", "", "zä")]


def test_gzipped_files_are_read(tmp_path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "a", "text": "x"}\n'))
    assert [document.doc_id for document in jsonl.read(path)] == ["a"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorpusError, match="cannot read"):
        list(jsonl.read(path))


def test_documents_come_one_by_one(tmp_path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"id": "a", "text": "x"}\nnot json\n')
    documents = jsonl.read(path)
    assert next(documents).doc_id == "a"
    with pytest.raises(CorpusError):
        next(documents)


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
        ('{"id": "b", "text": 3}', "needs a text"),
        ('{"id": "b", "title": 3, "text": "x"}', "title of document 'b' is not text"),
        ('{"id": "b", "title": " ", "text": ""}', "neither title nor text"),
        ('{"id": "a", "text": "again"}', "'a' occurs a second time"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line: str, message: str) -> None:
    with pytest.raises(CorpusError, match=rf"docs\.jsonl:2: .*{message}"):
        rows(tmp_path, '{"id": "a", "title": "only a title", "text": ""}\n' + line + "\n")
