"""Test that an agent that leaves something behind harms no session but its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from harness1.records import Status
from tests.agents.test_agent_sessions import Played, tasks_of

HAUNTED = """
if manner == "haunted":
    if not os.path.exists(STOP + ".begun"):
        open(STOP + ".begun", "w").close()
        subprocess.Popen([sys.executable, "-c", GHOST, STOP, os.getcwd()], start_new_session=True)
        while not os.path.exists("ghost"):
            time.sleep(0.01)
        sys.exit()
    ask(task["query"])
"""
GHOST = """
import os, sys, time
stop, folder = sys.argv[1:]
ends = time.time() + 20
while time.time() < ends and not os.path.exists(stop):
    try:
        os.makedirs(folder, exist_ok=True)
        open(folder + "/ghost", "w").close()
    except OSError:
        pass
"""


def test_what_an_attempt_left_behind_cannot_write_in_the_folder_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    played, stop = Played(tmp_path), tmp_path / "stop"
    script = tmp_path / "agent.py"
    begin = f"GHOST, STOP = {GHOST!r}, {str(stop)!r}\n"
    head, task, rest = script.read_text().partition("history = ask")
    script.write_text(begin + head + HAUNTED + task + rest)
    try:
        haunted, good = played.play(tasks_of("haunted", "good"))
    finally:
        stop.touch()
    assert (haunted.status, haunted.error) == (Status.COMPLETED, None)
    assert (good.status, len(good.turns)) == (Status.COMPLETED, 2)
