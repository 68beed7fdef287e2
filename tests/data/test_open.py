"""The documentation of Python's standard library as a corpus, under public names."""

import os
import subprocess
import sys

import pytest

from harness1.data import beir
from harness1.data.open import open_source, stdlib_source
from harness1.data.source import Source
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId, Gold, Task
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
    (tmp_path / "b.txt").write_bytes(b"\xff")
    source = open_source(str(tmp_path))
    assert source.kind == "folder"
    for _ in range(2):
        assert [document.doc_id for document in source.documents()] == ["a.txt"]
        assert source.problems == ["b.txt: not UTF-8 text (byte 0)"]


def test_a_corpus_without_documents_is_an_error(tmp_path) -> None:
    (tmp_path / "docs.jsonl").write_text("\n")
    with pytest.raises(CorpusError, match=r"docs\.jsonl holds no documents"):
        list(open_source(str(tmp_path / "docs.jsonl")).documents())
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match=r"holds no documents; a\.txt: not UTF-8"):
        list(open_source(str(tmp_path / "texts")).documents())


def test_what_cannot_be_a_corpus_is_refused(tmp_path) -> None:
    (tmp_path / "notes.doc").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no such file or folder"):
        open_source(str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="not a corpus"):
        open_source(str(tmp_path / "notes.doc"))
    with pytest.raises(CorpusError, match=r"holds no \.md"):
        list(open_source(str(tmp_path / "empty")).documents())


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
