"""Test that what an agent, or a judge, leaves behind costs its own session alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness1.agents.sandbox import closed_paths, free_user, needed_paths

CLOSED = """
import os
from harness1.agents.process import keep_plain, sessions_folder
os.getuid() or os.setuid(65534)
with sessions_folder() as within:
    work = within / "agent" / "work"
    work.mkdir(parents=True)
    for closed in (work.parent, within):
        closed.chmod(0)
        keep_plain(work)
        assert work.is_dir()
    assert within.stat().st_mode & 0o777 == 0o711
assert not within.exists()
"""


def test_an_agent_that_closes_the_folders_above_its_own_ends_no_training() -> None:
    subprocess.run([sys.executable, "-c", CLOSED], check=True)


def test_an_entry_of_path_opens_no_folder_above_it(tmp_path: Path) -> None:
    tools, own = tmp_path / ".cargo" / "bin", tmp_path / ".local" / "bin" / "agent"
    for folder in (tools, own.parent):
        folder.mkdir(parents=True)
    own.touch(0o755)
    variables = {"PATH": f"{tools}:{own.parent}:/usr/bin"}
    needed = needed_paths(["sh", "-c", "true"], variables)
    assert {str(tools), str(own.parent)} <= needed
    assert not {str(tools.parent), str(own.parent.parent)} & needed
    needed = needed_paths(["agent"], variables)
    assert str(own.parent.parent) in needed
    closed = closed_paths(tmp_path / "out", [], "judge:f1", tmp_path, needed)
    assert closed == {str(tools.parent), str(tmp_path / "out")}


def test_no_two_sessions_are_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    assert len({free_user() for _ in range(100)}) == 100
