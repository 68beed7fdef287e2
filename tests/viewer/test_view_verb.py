from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import command_in_process
from tests.viewer.making import script, some_tasks, write_run, write_training


def test_the_verb_writes_a_file_and_says_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", [script()], some_tasks(2), None)
    folders = [str(tmp_path / "run"), str(write_training(tmp_path / "train"))]
    out = tmp_path / "view.html"
    command = command_in_process(monkeypatch, capsys)
    done = command("view", *folders, "--out", str(out), "--tasks", "task-1, ", "--json")
    assert done.code == 0
    said = json.loads(done.out)
    assert (said["path"], said["episodes"], said["left_out"]) == (str(out), 1, 1)
    assert said["size"] == out.stat().st_size
