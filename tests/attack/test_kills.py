"""A command may be killed at any moment: what it left is whole, and going on ends as if nobody had been killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.retrieval.build import add_documents, build_index, delete_documents
from harness1.retrieval.files import CURRENT, check_index
from harness1.retrieval.index import open_index
from harness1.runs.files import read_stage
from harness1.runs.folder import CONFIG
from harness1.runs.journal import EPISODES, read_episodes
from tests.attack.attack import Attack
from tests.run_folders import repeatable

HASHED = load_config(None, ["index.dense.model=hash:64"])
DOCUMENTS = list(open_source("world:120").documents())
MOMENTS, EVALUATIONS = 120, 12
"""Kills in all, of builds and of evaluations."""
EACH = 3
"""Kills of one evaluation before it may end."""

Step = Callable[[], object]


def changes(index: Path, config: Config) -> dict[str, Step]:
    gone = [document.doc_id for document in DOCUMENTS[10:20]]
    return {
        "build": lambda: build_index(DOCUMENTS[:80], index, config.index),
        "add": lambda: add_documents(DOCUMENTS[60:], index),
        "delete": lambda: delete_documents(gone, index),
    }


def die_within(step: Step, delay: float) -> int:
    """Carry out a step in another process that is killed after some seconds; its exit status."""
    child = os.fork()
    if not child:
        try:
            step()
        finally:
            os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def state(index: Path) -> str:
    """The hash of an index, all of whose files are whole; nothing where there is none."""
    if not (index / CURRENT).exists():
        return ""
    assert not check_index(index).damaged
    return open_index(index).info.index_hash


def die_and_go_on(index: Path, config: Config, delay: Callable[[str], float]) -> tuple[int, list[str]]:
    """Carry out all changes, each killed once before; the kills, and the states after them and after going on."""
    kills, states = 0, []
    for name, step in changes(index, config).items():
        before = state(index)
        kills += os.WIFSIGNALED(die_within(step, delay(name)))
        after = state(index)
        if name == "delete" and after != before:
            states.append(after)
            continue
        step()
        states.append(state(index))
        assert after in (before, states[-1]), name
    return kills, states


@pytest.mark.parametrize("config", [Config(), HASHED], ids=["terms", "embeddings"])
def test_an_index_killed_at_any_moment_is_whole(tmp_path: Path, config: Config, attack: Attack) -> None:
    rng = attack.random("kills")
    whole, spans = tmp_path / "whole", {}
    expected = []
    for name, step in changes(whole, config).items():
        started = time.monotonic()
        step()
        spans[name] = time.monotonic() - started
        expected.append(state(whole))
    kills = 0
    for number in range(attack.times(MOMENTS // 6)):
        died, states = die_and_go_on(tmp_path / str(number), config, lambda name: rng.uniform(0, 1.2 * spans[name]))
        assert states == expected
        kills += died
    attack.report(f"kills, index with {'embeddings' if config.index.dense.model else 'terms'}", kills=kills)


TASKS, SAMPLES = 20, 2
WAIT_S = 120.0
Moment = Callable[[], bool]


def command(place: Path, out: str, workers: int, *more: str) -> subprocess.Popen[bytes]:
    """An evaluation in a process group of its own, with which its workers can be killed."""
    settings = [
        f"--set=machine.workers={workers}",
        "--set=machine.concurrency=2",
    ]
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


def played(out: Path, wanted: int) -> bool:
    path = out / EPISODES
    return path.is_file() and path.read_bytes().count(b"\n") >= wanted


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


@pytest.mark.slow
def test_an_evaluation_killed_at_any_moment_goes_on(tmp_path: Path, attack: Attack) -> None:
    rng = attack.random("evaluations")
    for workers in (1, 2):  # the card and `config.toml` name the workers of the command that ended the run
        completed(command(tmp_path, f"whole-{workers}", workers))
    one, two = (repeatable(tmp_path / f"whole-{workers}") for workers in (1, 2))
    assert {name for name in one if one[name] != two[name]} == {CONFIG}
    kills = 0
    for number in range(attack.times(EVALUATIONS // EACH)):
        out, workers = tmp_path / f"killed-{number}", rng.choice((1, 2))
        for _ in range(attack.times(EACH)):
            # With a cache of its own, the index is being built when some of the kills come.
            moment = partial(played, out, rng.randrange(40))
            process = command(tmp_path, out.name, workers, "--cache", f"cache-{number}")
            kills += killed(process, moment, rng.random())
        completed(command(tmp_path, out.name, workers, "--cache", f"cache-{number}"))
        assert_same(out, tmp_path / f"whole-{workers}")
    attack.report("kills, evaluation", kills=kills)
