"""`harness1 fuse` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness1.records import StopReason
from tests.cli.commands import Command, command_in_process
from tests.eval.run_folders import dataset, episode, run_folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = dataset(tmp_path / "data", {"t1": "?"})
    broken = episode("t1", "x", sample=2, stop=StopReason.FAULT)
    run_folder(Path("sampled"), data, [episode("t1", "a"), episode("t1", "b", sample=1), broken], samples=3)
    run_folder(Path("single"), data, [episode("t1", "x")])


@pytest.mark.usefixtures("runs")
def test_samples_become_one_run_that_others_can_be_compared_with(command: Command) -> None:
    ended = command("fuse", "sampled", "--out", "fused", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["curated_recall"]["mean"] == 1.0
    assert "infrastructure broke them: 1" in ended.err
    compared = json.loads(command("compare", "single", "fused", "--json").out)
    assert compared["others"][0]["metrics"]["curated_recall"]["difference"]["mean"] == 1.0
    assert compared["others"][0]["cards"]["fused from"][1] == [str(Path("sampled").resolve())]


@pytest.mark.usefixtures("runs")
def test_a_path_is_no_markup(command: Command) -> None:
    ended = command("fuse", "sampled", "--out", "n[/x]")
    assert (ended.code, "Everything is in n[/x]." in ended.out) == (0, True)


@pytest.mark.usefixtures("runs")
def test_a_finished_fusion_is_not_overwritten_by_another(command: Command) -> None:
    assert "Everything is in fused" in command("fuse", "sampled", "single", "--out", "fused").out
    assert command("fuse", "sampled", "single", "--out", "fused").code == 0
    assert "--force" in command("fuse", "sampled", "--out", "fused").err
    assert command("fuse", "sampled", "--out", "fused", "--force").code == 0


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["single"], "nothing to fuse"),
        (["sampled", "nowhere"], "nowhere is not a run folder"),
        (["sampled", "--cap", "31"], "cap of 1 to 30"),
        (["sampled", "--k", "0"], "k of at least 1"),
    ],
)
def test_a_mistake_is_told_in_one_line(command: Command, arguments: list[str], said: str) -> None:
    ended = command("fuse", *arguments, "--out", "fused")
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert not Path("fused").exists()


@pytest.mark.usefixtures("runs")
def test_a_source_is_never_written_over(command: Command) -> None:
    before = Path("sampled/episodes.jsonl").read_bytes()
    assert command("fuse", "sampled", "--out", "sampled", "--force").code == 2
    assert Path("sampled/episodes.jsonl").read_bytes() == before


@pytest.mark.usefixtures("runs")
def test_a_fused_run_has_no_turns_to_replay(command: Command) -> None:
    command("fuse", "sampled", "single", "--out", "fused")
    ended = command("replay", "fused")
    assert ended.code == 2
    assert "replay those" in ended.err
