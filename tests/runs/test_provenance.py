"""Where a run comes from."""

from __future__ import annotations

import subprocess
from datetime import datetime
from pathlib import Path

import pytest

import harness1
from harness1.runs import folder
from harness1.runs.folder import (
    SESSION,
    begin_provenance,
    checkout,
    describe_process,
    end_provenance,
    read_provenance,
    wall_seconds,
)

FACTS = {"dataset": "world:100", "hashes": {"env": "e"}}


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=N", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    git(tmp_path, "init")
    return folder


def test_a_session_says_with_what_and_when(tmp_path: Path) -> None:
    begin_provenance(tmp_path, FACTS, runs=True)
    begun = read_provenance(tmp_path)
    assert begun is not None
    assert begun.keys() == {*FACTS, *SESSION, "earlier"}
    assert begun["ended"] is None
    end_provenance(tmp_path)
    ended = read_provenance(tmp_path)
    assert ended is not None
    assert datetime.fromisoformat(ended["started"]) <= datetime.fromisoformat(ended["ended"])
    assert ended["machine"]["cores"] > 0
    assert ended["machine"]["memory"] > 2**20
    assert ended["libraries"].keys() >= {"msgspec", "numpy"}


def test_a_resumed_run_names_everyone_who_ran_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("first", "second", "third"):
        monkeypatch.setattr(folder, "checkout", lambda _, commit=commit: (commit, False))
        begin_provenance(tmp_path, FACTS, runs=True)
    end_provenance(tmp_path)
    found = read_provenance(tmp_path)
    assert found is not None
    assert [each["commit"] for each in (*found["earlier"], found)] == ["first", "second", "third"]
    assert [each["ended"] is None for each in (*found["earlier"], found)] == [True, True, False]


def test_who_only_makes_files_anew_is_not_named(tmp_path: Path) -> None:
    begin_provenance(tmp_path, FACTS, runs=True)
    end_provenance(tmp_path)
    before = (tmp_path / "provenance.json").read_bytes()
    begin_provenance(tmp_path, FACTS, runs=False)
    end_provenance(tmp_path)
    assert (tmp_path / "provenance.json").read_bytes() == before


@pytest.mark.parametrize("damage", [None, b"{", b"{}", b"[]"])
def test_times_that_nobody_knows_are_not_made_up(tmp_path: Path, damage: bytes | None) -> None:
    if damage is not None:
        (tmp_path / "provenance.json").write_bytes(damage)
    begin_provenance(tmp_path, FACTS, runs=False)
    end_provenance(tmp_path)
    found = read_provenance(tmp_path)
    assert found is not None
    assert (found["started"], found["ended"], found["earlier"]) == (None, None, [])


def test_seconds_on_the_clock_are_those_of_all_processes_and_unknown_where_one_was_killed() -> None:
    day = "2026-01-01T00:00:{:06.3f}+00:00"
    first, second = ({"started": day.format(a), "ended": day.format(b)} for a, b in ((0, 10.5), (40, 42)))
    assert wall_seconds({**second, "earlier": [first]}) == 12.5
    assert wall_seconds({**second, "earlier": []}) == 2.0
    assert wall_seconds({**second, "earlier": [{**first, "ended": None}]}) is None
    assert wall_seconds({**first, "started": None, "earlier": []}) is None
    assert wall_seconds(None) is None


def test_a_checkout_has_a_commit_and_may_be_dirty(package: Path) -> None:
    git(package, "add", ".")
    git(package, "commit", "-m", "first")
    commit, dirty = checkout(package)
    assert commit is not None
    assert (len(commit), dirty) == (40, False)
    (package / "new.py").write_text("")
    assert checkout(package) == (commit, True)


def test_an_installed_package_has_no_commit_though_it_lies_in_a_repository(package: Path) -> None:
    (package.parent / "mine.txt").write_text("")
    git(package.parent, "add", "mine.txt")
    git(package.parent, "commit", "-m", "first")
    assert checkout(package) == (None, None)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert checkout(Path(harness1.__file__).parent) == (None, None)
    assert describe_process()["python"]
