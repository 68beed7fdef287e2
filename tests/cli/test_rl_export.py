"""Episodes for SkyRL by the command that a user types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adapters.test_skyrl_export import batches, pair, played, save_run
from tests.cli.commands import Command, command_in_process


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command in this process, in a working folder with a run of three groups, one of them of equal rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    save_run(tmp_path / "run", [*pair("a", 1.0, 0.0), *pair("b", 0.5, 0.5), *pair("c", 0.0, 1.0)])
    return command_in_process(monkeypatch, capsys)


def test_an_export_says_what_it_holds_and_what_it_left_out(harness1: Command, tmp_path: Path) -> None:
    ended = harness1("rl", "export", "run", "--to", "skyrl", "--out", "rows", "--groups-per-file", "1")
    assert ended.code == 0, ended.err
    assert "2 files of 1 groups: 4 episodes, 8 steps" in ended.out
    assert "groups left out: 1 equal rewards" in ended.out
    assert "rows/README.md says how" in ended.out
    assert len(batches(tmp_path / "rows")) == 2


def test_an_export_prints_one_object_of_what_it_holds(harness1: Command) -> None:
    ended = harness1("rl", "export", "run", "--out", "rows", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["files"], found["groups_per_file"], found["episodes"]) == (1, 2, 4)
    assert found["left_out_groups"] == {"equal_rewards": 1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--out", "rows"], "nowhere is not a run folder"),
        (["run", "--out", "run"], "run is not empty and holds nothing of `harness1 rl export`"),
        (["run", "--out", "rows", "--groups-per-file", "9"], "give a lower --groups-per-file"),
        (["scripted", "--out", "rows"], "scripted holds no model calls"),
    ],
)
def test_what_is_wrong_with_an_export_is_one_line(
    harness1: Command, tmp_path: Path, arguments: list[str], says: str
) -> None:
    save_run(tmp_path / "scripted", [played(str(at), None, at, float(at), turns=()) for at in range(2)])
    ended = harness1("rl", "export", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not (tmp_path / "rows").exists()
