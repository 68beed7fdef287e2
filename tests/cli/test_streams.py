"""Standard streams that are closed early, or that cannot encode what is printed."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness1.config import Config
from harness1.data.open import open_source
from harness1.retrieval.build import build_index
from harness1.runs.journal import read_episodes

pytestmark = pytest.mark.service
QUESTION = "Which castle stands in T\u014dky\u014d \u2603?"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams") / "index"
    build_index(open_source("world:100").documents(), folder, Config().index)
    return folder


def search(
    index: Path, out: Path, *more: str, stdout: int, stderr: int = subprocess.PIPE, **variables: str
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harness1", "search", QUESTION, "--index", str(index), "--out", str(out), *more]
    environment: Mapping[str, str] = {**os.environ, **variables}
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)


def test_an_episode_is_recorded_even_if_nobody_reads_its_steps(index: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = search(index, tmp_path, stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(timeout=120) == 0
    assert len(list(read_episodes(tmp_path))) == 1


def test_what_a_terminal_cannot_encode_is_escaped(index: Path, tmp_path: Path) -> None:
    process = search(index, tmp_path / "run", stdout=subprocess.PIPE, PYTHONIOENCODING="latin-1")
    shown, told = process.communicate(timeout=120)
    assert (process.returncode, told) == (0, b"")
    assert rb"T\u014dky\u014d \u2603" in shown
    process = search(tmp_path / "\u2603", tmp_path, stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    _, told = process.communicate(timeout=120)
    assert (process.returncode, b"Traceback" in told) == (2, False)
    assert rb"\u2603" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_reported_in_one_line() -> None:
    command = [sys.executable, "-m", "harness1", "config", "show"]
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert process.returncode == 3
    assert process.stderr == b"harness1: the output cannot be written: No space left on device\n"
