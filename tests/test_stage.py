"""The card of a folder: equal inputs and a finished status mean that there is nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness1.errors import SchemaError
from harness1.stage import STAGE, Stage, read_stage, write_atomically

CARD = Stage("index", {"corpus": "abc", "settings": {"k1": 1.2}})


def test_a_finished_folder_with_equal_inputs_is_done(tmp_path: Path) -> None:
    assert not CARD.is_done(tmp_path)
    CARD.write(tmp_path)
    assert not CARD.is_done(tmp_path)
    CARD.write(tmp_path, status="interrupted")
    assert not CARD.is_done(tmp_path)
    done = CARD.write(tmp_path, status="finished", outputs={"documents": 3})
    assert CARD.is_done(tmp_path)
    assert read_stage(tmp_path) == done


def test_other_inputs_or_another_verb_are_other_work(tmp_path: Path) -> None:
    CARD.write(tmp_path, status="finished")
    assert not Stage("index", {"corpus": "abd", "settings": {"k1": 1.2}}).is_done(tmp_path)
    assert not Stage("evaluate", CARD.inputs).is_done(tmp_path)


def test_what_is_no_card_is_refused(tmp_path: Path) -> None:
    assert read_stage(tmp_path) is None
    for text in ("", "{", '{"verb": 3}', '{"verb": "x"}', '{"verb": "x", "inputs": {}, "status": "odd"}'):
        (tmp_path / STAGE).write_text(text)
        with pytest.raises(SchemaError, match="not a stage card"):
            read_stage(tmp_path)


def test_a_file_is_replaced_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"2"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]
