"""A run that is killed at any moment goes on: no episode is lost or doubled, and what is made of them is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness1.runs.files import read_stage
from harness1.runs.folder import CONFIG
from harness1.runs.journal import read_episodes
from tests.run_folders import repeatable

pytestmark = pytest.mark.service

TASKS, SAMPLES = 20, 2
WAIT_S = 120.0
Moment = Callable[[], bool]


def command(place: Path, out: str, workers: int, *more: str) -> subprocess.Popen[bytes]:
    """An evaluation in a process group of its own, with which its workers can be killed."""
    settings = [f"--set=machine.workers={workers}", "--set=machine.concurrency=2", "--set=machine.bootstrap=200"]
    arguments = ["eval", "world:100", "--policy", "random", "--split", "train", "--seed", "5", "--json", *settings]
    arguments += ["--limit", str(TASKS), "--samples", str(SAMPLES), "--out", out, "--cache", "cache", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "harness1", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def completed(process: subprocess.Popen[bytes]) -> None:
    _, complaint = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, complaint.decode()


def killed(process: subprocess.Popen[bytes], moment: Moment, delay: float) -> bool:
    """Kill a process and its workers a little after a moment; False if it had finished by then."""
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and not moment() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return alive


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run by one process and the same by two, which nobody killed."""
    folder = tmp_path_factory.mktemp("killed")
    for workers in (1, 2):
        completed(command(folder, f"whole-{workers}", workers))
    return folder


def test_the_number_of_workers_changes_nothing(place: Path) -> None:
    one, two = (repeatable(place / f"whole-{workers}") for workers in (1, 2))
    assert {name for name in one if one[name] != two[name]} == {CONFIG}


def assert_same(out: Path, whole: Path) -> None:
    ran = [episode.key for episode in read_episodes(out)]
    assert len(ran) == len(set(ran))
    assert set(ran) == {episode.key for episode in read_episodes(whole)}
    stages = [read_stage(folder) for folder in (out, whole)]
    assert [stage and stage.status for stage in stages] == ["finished"] * 2
    mine, theirs = repeatable(out), repeatable(whole)
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if mine[name] != theirs[name]] == []
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
