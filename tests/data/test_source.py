import pytest

from harness1.data import beir
from harness1.data.open import open_source
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document

DOCUMENT = Document(doc_id=DocId("a"), title="T", text="x")
TASK = Task(task_id="q", query="Q", split="dev", gold=Gold(relevant={DocId("a"): 1}))


def test_a_beir_folder_has_documents_and_tasks(tmp_path) -> None:
    beir.write(tmp_path / "set", [DOCUMENT], [TASK])
    source = open_source(str(tmp_path / "set"))
    assert (source.name, source.kind, source.splits) == ("set", "beir", ("dev",))
    assert list(source.documents()) == list(source.documents()) == [DOCUMENT]
    assert source.tasks("dev") == [TASK]
    with pytest.raises(UsageError, match="no split 'test'; it has: dev"):
        source.tasks("test")


def test_a_jsonl_file_has_documents_only(tmp_path) -> None:
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
    for spec in ("world:", "world:many", "world:-5"):
        with pytest.raises(UsageError, match="world:SIZE"):
            open_source(spec)


def test_a_synthetic_world_is_a_source() -> None:
    source = open_source("world:40")
    assert source.kind == "world"
    assert len(list(source.documents())) == 40
    assert source.splits
