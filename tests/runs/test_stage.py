"""The card of a folder: equal inputs and a finished status mean that there is nothing to do."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from harness1.config import Config
from harness1.errors import SchemaError, UsageError
from harness1.runs.files import (
    STAGE,
    Stage,
    clear,
    read_stage,
    refuse_foreign,
    refuse_other,
    under_way,
    write_atomically,
)
from harness1.runs.folder import run_config

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


def test_a_card_from_before_the_machine_had_its_name_is_read(tmp_path: Path) -> None:
    old = msgspec.to_builtins(Config())
    old["run"] = old.pop("machine") | {"workers": 3}
    Stage("run", {}, outputs={"config": old, "index": "index"}).write(tmp_path)
    config, _ = run_config(tmp_path)
    assert config.machine.workers == 3


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


def test_the_card_says_what_became_of_the_work(tmp_path: Path) -> None:
    stage = Stage("work", {"a": 1})
    with under_way(stage, tmp_path):
        assert read_stage(tmp_path) == stage
    with pytest.raises(KeyboardInterrupt), under_way(stage, tmp_path):
        raise KeyboardInterrupt
    found = read_stage(tmp_path)
    assert found is not None
    assert found.status == "interrupted"


def test_a_full_disk_is_said_in_words_and_with_the_file(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "weights"))
    with pytest.raises(UsageError, match="weights: no space left on its disk"), under_way(Stage("work", {}), tmp_path):
        raise full


def test_only_what_the_same_verb_wrote_is_written_over(tmp_path: Path) -> None:
    refuse_foreign(tmp_path / "absent", "work")
    refuse_foreign(tmp_path, "work")
    Stage("work", {}).write(tmp_path)
    refuse_foreign(tmp_path, "work")
    with pytest.raises(UsageError, match="holds nothing of `harness1 play`"):
        refuse_foreign(tmp_path, "play")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        refuse_foreign(tmp_path / "foreign", "work")
    with pytest.raises(UsageError, match="cannot be written to"):
        refuse_foreign(tmp_path / "foreign" / "notes.txt", "work")


def test_a_folder_that_has_a_mark_and_no_card_yet_is_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("")
    refuse_foreign(tmp_path, "work", mark="journal")
    with pytest.raises(UsageError, match="holds no journal: choose another --record"):
        refuse_foreign(tmp_path, "work", "no journal", option="--record")
    Stage("play", {}).write(tmp_path)
    with pytest.raises(UsageError, match="not empty"):
        refuse_foreign(tmp_path, "work", mark="journal")


def test_other_work_of_the_same_verb_is_refused_by_what_differs(tmp_path: Path) -> None:
    refuse_other(CARD, tmp_path, "index")
    CARD.write(tmp_path)
    refuse_other(CARD, tmp_path, "index")
    other = Stage("index", CARD.inputs | {"corpus": "abd"})
    with pytest.raises(UsageError, match=r"holds another index \(it differs in corpus\): choose another --out, or"):
        refuse_other(other, tmp_path, "index")


def filled(folder: Path) -> Path:
    Stage("work", {}).write(folder)
    (folder / "state").mkdir()
    for name in ("rows.bin", "rows.sample1.bin", "state/weights", "notes.txt"):
        (folder / name).write_text("")
    return folder


def test_clearing_removes_what_matches_and_the_card(tmp_path: Path) -> None:
    clear(filled(tmp_path), "work", "rows.bin", "rows.sample*.bin", "state", "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_clearing_may_keep_the_card(tmp_path: Path) -> None:
    clear(filled(tmp_path), "work", "*", keep_card=True)
    assert [path.name for path in tmp_path.iterdir()] == [STAGE]


def test_what_is_foreign_is_not_cleared(tmp_path: Path) -> None:
    before = sorted(filled(tmp_path).iterdir())
    with pytest.raises(UsageError, match="holds nothing of `harness1 play`"):
        clear(tmp_path, "play", "*")
    assert sorted(tmp_path.iterdir()) == before


def test_a_clearing_that_is_cut_short_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    unlink = Path.unlink

    def fails(path: Path, missing_ok: bool = False) -> None:
        if path.name == "rows.bin":
            raise OSError(errno.EIO, "Input/output error", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(UsageError, match=r"rows\.bin cannot be removed"):
        clear(tmp_path, "work", "*")
    monkeypatch.undo()
    clear(tmp_path, "work", "*")
    assert list(tmp_path.iterdir()) == []
