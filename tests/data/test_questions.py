"""Questions with passages in Parquet, as the hub has them, are tasks over the passages."""

import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow.parquet import write_table

from harness1.data.open import open_source

A, B, C = ({"docid": name, "title": name.upper(), "text": f"text {name}"} for name in "abc")


@pytest.mark.usefixtures("parquet_here")
def test_questions_with_passages_are_tasks_over_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [
        {"query_id": "1", "query": "what?", "positive_passages": [A], "negative_passages": [B]},
        {"query_id": "2", "query": "who?", "positive_passages": [B, {**C, "text": None, "title": None}]},
    ]
    for part, row in enumerate(rows):
        write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data" / f"train-0000{part}-of-00002.parquet")
    write_table(pyarrow.Table.from_pylist([C]), tmp_path / "data" / "corpus.parquet")
    (tmp_path / "README.md").write_text("About it")
    source = open_source(str(tmp_path))
    told = "1 other file not read, because Parquet files hold questions with passages"
    assert source.reading.lines() == [told]
    assert [(each.doc_id, each.title) for each in source.documents()] == [("a", "A"), ("b", "B"), ("c", "C")]
    found = {task.task_id: (task.query, dict(task.gold.relevant)) for task in source.tasks("train")}
    assert found == {"1": ("what?", {"a": 1}), "2": ("who?", {"b": 1, "c": 1})}


def test_other_parquet_files_are_named_as_not_read(tmp_path: Path) -> None:
    write_table(pyarrow.Table.from_pylist([A]), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("kept")
    source = open_source(str(tmp_path))
    assert [document.doc_id for document in source.documents()] == ["b.txt"]
    assert source.reading.lines() == ["1 file of 1 kind was not read (.parquet 1)"]


def test_a_parquet_file_whose_name_is_not_utf_8_is_read_as_any_other(tmp_path: Path) -> None:
    write_table(pyarrow.Table.from_pylist([A]), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / os.fsdecode(b"\xff.parquet"))
    (tmp_path / "b.txt").write_text("kept")
    assert [document.doc_id for document in open_source(str(tmp_path)).documents()] == ["b.txt"]


@pytest.mark.usefixtures("parquet_here")
def test_a_number_behind_a_chunk_may_be_longer_than_numbers_are(tmp_path: Path) -> None:
    row = {"query_id": "1", "query": "what?", "positive_passages": [A]}
    write_table(pyarrow.Table.from_pylist([row]), tmp_path / "test.parquet")
    write_table(pyarrow.Table.from_pylist([{"chunk_id": f"d_{'9' * 5000}", "text": "far"}]), tmp_path / "rest.parquet")
    assert [len(document.doc_id) for document in open_source(str(tmp_path)).documents()] == [1, 5002]
