"""The card of a folder: equal inputs and a finished status mean that there is nothing to do."""

import errno
import os
import subprocess
import threading
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from harness1.config import Config
from harness1.errors import SchemaError, UsageError
from harness1.runs import files, folder
from harness1.runs.folder import (
    SESSION,
    checkout,
    keep_provenance,
    read_provenance,
    run_config,
    wall_seconds,
)

CARD = files.Stage("index", {"corpus": "abc", "settings": {"k1": 1.2}})


def test_a_finished_folder_with_equal_inputs_is_done_and_other_work_is_refused(tmp_path: Path) -> None:
    assert not CARD.is_done(tmp_path)
    files.refuse_other(CARD, tmp_path, "index")
    for status in ("running", "interrupted"):
        CARD.write(tmp_path, status=status)
        assert not CARD.is_done(tmp_path)
    done = CARD.write(tmp_path, status="finished", outputs={"documents": 3})
    assert CARD.is_done(tmp_path)
    assert files.read_stage(tmp_path) == done
    files.refuse_other(CARD, tmp_path, "index")
    other = files.Stage("index", CARD.inputs | {"corpus": "abd"})
    assert not other.is_done(tmp_path)
    assert not files.Stage("evaluate", CARD.inputs).is_done(tmp_path)
    with pytest.raises(UsageError, match=r"holds another index \(it differs in corpus\): choose another --out, or"):
        files.refuse_other(other, tmp_path, "index")


def test_a_card_from_before_the_machine_had_its_name_is_read(tmp_path: Path) -> None:
    old = msgspec.to_builtins(Config())
    old["run"] = old.pop("machine") | {"workers": 3}
    files.Stage("run", {}, outputs={"config": old, "index": "index"}).write(tmp_path)
    config, _ = run_config(tmp_path)
    assert config.machine.workers == 3


def test_what_is_no_card_is_refused(tmp_path: Path) -> None:
    assert files.read_stage(tmp_path) is None
    for text in ("", "{", '{"verb": 3}', '{"verb": "x"}', '{"verb": "x", "inputs": {}, "status": "odd"}'):
        (tmp_path / files.STAGE).write_text(text)
        with pytest.raises(SchemaError, match="not a stage card"):
            files.read_stage(tmp_path)


def test_the_card_says_what_became_of_the_work(tmp_path: Path) -> None:
    stage = files.Stage("work", {"a": 1})
    with files.under_way(stage, tmp_path):
        assert files.read_stage(tmp_path) == stage
    with pytest.raises(KeyboardInterrupt), files.under_way(stage, tmp_path):
        raise KeyboardInterrupt
    found = files.read_stage(tmp_path)
    assert found.status == "interrupted"
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "weights"))
    with pytest.raises(UsageError, match="weights: no space left on its disk"), files.under_way(stage, tmp_path):
        raise full


def test_only_what_the_same_verb_wrote_is_written_over(tmp_path: Path) -> None:
    files.refuse_foreign(tmp_path / "absent", "work")
    files.refuse_foreign(tmp_path, "work")
    (tmp_path / "journal").write_text("")
    files.refuse_foreign(tmp_path, "work", mark="journal")  # before it has a card
    with pytest.raises(UsageError, match="holds no journal: choose another --record"):
        files.refuse_foreign(tmp_path, "work", "no journal", option="--record")
    files.Stage("work", {}).write(tmp_path)
    files.refuse_foreign(tmp_path, "work")
    with pytest.raises(UsageError, match="holds nothing of `harness1 play`"):
        files.refuse_foreign(tmp_path, "play", mark="journal")
    with pytest.raises(UsageError, match="cannot be written to"):
        files.refuse_foreign(tmp_path / "journal", "work")


def filled(folder: Path) -> Path:
    files.Stage("work", {}).write(folder)
    (folder / "state").mkdir(exist_ok=True)
    for name in ("rows.bin", "rows.sample1.bin", "state/weights", "notes.txt"):
        (folder / name).write_text("")
    return folder


def test_clearing_removes_what_matches_and_the_card(tmp_path: Path) -> None:
    before = sorted(filled(tmp_path).iterdir())
    with pytest.raises(UsageError, match="holds nothing of `harness1 play`"):
        files.clear(tmp_path, "play", "*")
    assert sorted(tmp_path.iterdir()) == before
    files.clear(tmp_path, "work", "rows.bin", "rows.sample*.bin", "state", "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    files.clear(filled(tmp_path), "work", "*", keep_card=True)
    assert [path.name for path in tmp_path.iterdir()] == [files.STAGE]


def test_a_clearing_that_is_cut_short_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    unlink = Path.unlink

    def fails(path: Path, missing_ok: bool = False) -> None:
        if path.name == "rows.bin":
            raise OSError(errno.EIO, "Input/output error", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(UsageError, match=r"rows\.bin cannot be removed"):
        files.clear(tmp_path, "work", "*")
    monkeypatch.undo()
    files.clear(tmp_path, "work", "*")
    assert list(tmp_path.iterdir()) == []


FACTS = {"dataset": "world:100", "hashes": {"env": "e"}}


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=N", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_resumed_run_names_everyone_who_ran_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as processes:  # the first two are killed
        for commit in ("first", "second", "third"):
            monkeypatch.setattr(folder, "checkout", lambda _, commit=commit: (commit, False))
            processes.enter_context(keep_provenance(tmp_path, FACTS, runs=True))
    found = read_provenance(tmp_path)
    assert [each["commit"] for each in (*found["earlier"], found)] == ["first", "second", "third"]
    assert [each["ended"] is None for each in (*found["earlier"], found)] == [True, True, False]
    assert found.keys() == {*FACTS, *SESSION, "earlier"}
    assert datetime.fromisoformat(found["started"]) <= datetime.fromisoformat(found["ended"])
    assert found["machine"]["cores"] > 0
    assert found["machine"]["memory"] > 2**20
    assert found["libraries"].keys() >= {"msgspec", "numpy"}
    with keep_provenance(tmp_path, FACTS, runs=False):
        pass
    assert read_provenance(tmp_path) == found  # who only makes files anew is not named


@pytest.mark.parametrize("damage", [None, b"{", b"{}", b"[]"])
def test_times_that_nobody_knows_are_not_made_up(tmp_path: Path, damage: bytes | None) -> None:
    if damage is not None:
        (tmp_path / "provenance.json").write_bytes(damage)
    with keep_provenance(tmp_path, FACTS, runs=False):
        pass
    found = read_provenance(tmp_path)
    assert (found["started"], found["ended"], found["earlier"]) == (None, None, [])


def test_seconds_on_the_clock_are_those_of_all_processes_and_unknown_where_one_was_killed() -> None:
    day = "2026-01-01T00:00:{:06.3f}+00:00"
    first, second = ({"started": day.format(a), "ended": day.format(b)} for a, b in ((0, 10.5), (40, 42)))
    assert wall_seconds({**second, "earlier": [first]}) == 12.5
    assert wall_seconds({**second, "earlier": []}) == 2.0
    assert wall_seconds({**second, "earlier": [{**first, "ended": None}]}) is None
    assert wall_seconds({**first, "started": None, "earlier": []}) is None
    assert wall_seconds(None) is None


def test_a_checkout_has_a_commit_and_an_installed_package_within_a_repository_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "mine.txt").write_text("")
    for words in (("init",), ("add", "mine.txt"), ("commit", "-m", "first")):
        git(tmp_path, *words)
    assert checkout(package) == (None, None)
    git(package, "add", ".")
    git(package, "commit", "-m", "second")
    commit, dirty = checkout(package)
    assert (len(commit), dirty) == (40, False)
    (package / "new.py").write_text("")
    assert checkout(package) == (commit, True)
    monkeypatch.setenv("PATH", "/nowhere")  # without git
    assert checkout(package) == (None, None)


def test_a_pipe_or_a_device_in_place_of_a_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("{}",), daemon=True)
    writer.start()
    for place in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        assert files.find_json(place) is None
        with pytest.raises(SchemaError, match="is no file"):
            files.read_json(place)
    assert writer.is_alive(), "nobody reads what it would write"
