import gzip

import pytest

from harness1.data import jsonl
from harness1.errors import CorpusError


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


def test_a_missing_file_is_a_clear_error(tmp_path) -> None:
    with pytest.raises(CorpusError, match="cannot read"):
        list(jsonl.read(tmp_path / "absent.jsonl"))
