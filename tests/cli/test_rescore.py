"""`harness1 eval --rescore`, and what `harness1 replay` says about lines without digests."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from harness1.runs.files import read_stage
from harness1.runs.journal import without_digest
from tests.cli.commands import Command, command_in_process
from tests.eval.run_folders import dataset

QUERIES = {"t1": "text a", "t2": "text b"}


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def evaluation(home: Path, *more: str) -> list[str]:
    settings = [
        "--set",
        "machine.workers=1",
    ]
    return ["eval", str(home / "data"), "--out", str(home / "run"), "--cache", str(home / "cache"), *settings, *more]


def test_new_gold_is_refused_and_scored_on_demand(harness1: Command, tmp_path: Path) -> None:
    data, run = dataset(tmp_path / "data", QUERIES), tmp_path / "run"
    before = json.loads(harness1(*evaluation(tmp_path, "--json")).out)
    dataset(data, QUERIES, gold="cdefghijklmnopqrstuvwxyz")
    refused = harness1(*evaluation(tmp_path))
    assert (refused.code, refused.err.count("\n"), "--rescore" in refused.err) == (2, 1, True)
    assert "--rescore" in harness1("compare", str(run), str(run)).err
    assert harness1(*evaluation(tmp_path, "--rescore", "--force")).code == 2
    again = harness1(*evaluation(tmp_path, "--rescore", "--json"))
    assert again.code == 0
    assert json.loads(again.out)["curated_recall"] != before["curated_recall"]
    assert harness1(*evaluation(tmp_path, "--json")).out == again.out
    assert harness1("replay", str(run)).code == 0
    dataset(data, {**QUERIES, "t2": "text z"})
    refused = harness1(*evaluation(tmp_path, "--rescore"))
    assert (refused.code, "task 't2' has changed" in refused.err) == (2, True)


def test_a_replay_counts_lines_without_digests(harness1: Command, tmp_path: Path) -> None:
    dataset(tmp_path / "data", QUERIES)
    assert harness1(*evaluation(tmp_path)).code == 0
    run = tmp_path / "run"
    assert "without digests" not in harness1("replay", str(run)).out
    lines = (run / "episodes.jsonl").read_bytes().splitlines()
    (run / "episodes.jsonl").write_bytes(b"".join(without_digest(line)[0] + b"\n" for line in lines))
    ended = harness1("replay", str(run))
    assert (ended.code, "lost its digest" in ended.err, ended.err.count("\n")) == (2, True, 1)
    stage = read_stage(run)
    old = {name: value for name, value in stage.outputs.items() if name != "lines"}
    msgspec.structs.replace(stage, outputs=old).write(run)
    assert "2 recorded without digests" in harness1("replay", str(run)).out
    assert json.loads(harness1("replay", str(run), "--json").out)["undigested"] == 2
