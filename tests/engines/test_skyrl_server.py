"""Training on SkyRL's own server of the Tinker API: our engine, and whole commands. Without it these tests are skipped;
`make test-skyrl` installs its JAX backend for a CPU and runs them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.micro import Start
from harness1.config import Lora, Machine, Train
from harness1.engines.loop import STATE
from harness1.engines.tinker import TinkerBackend, TinkerEngine, connect
from harness1.models.checkpoint import read_checkpoint
from harness1.records import Sampling
from harness1.rl.train import EPISODES
from harness1.rows import TrainRow
from harness1.runs.journal import read_episodes
from harness1.training.algorithm import Cispo
from harness1.training.log import read_log
from tests.cli.commands import Command, command_in_process
from tests.engines.skyrl_server import RANK, serving
from tests.rl.small_start import SETTINGS, small_start
from tests.support import run

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("skyrl", "tinker", "jax")),
        reason="SkyRL's server is not installed: make test-skyrl",
    ),
]
GATE = 1e-5
TRAIN = Train(lora=Lora(rank=RANK), rate=5e-3, schedule="constant")
PROMPT = tuple(range(65, 105))
WAITS_S = 600.0


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return small_start(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def url(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(start.folder / "start", tmp_path_factory.mktemp("server")) as url:
        yield url


async def nowhere(*_: object) -> None:
    raise AssertionError("a service delivers nothing to this process")


def test_the_trainer_knows_what_the_sampler_recorded_under_each_version(url: str, start: Start) -> None:
    base = start.folder / "start"
    backend = TinkerBackend(connect(str(base), url, Machine()))
    engine = TinkerEngine(backend, base, Cispo(), TRAIN, 60, "row_mean")
    drawn = [Sampling(max_tokens=16, seed=seed, stop_ids=(256,)) for seed in range(8)]
    largest = []
    for version in range(3):
        run(engine.publish(version, nowhere))
        outputs = [run(backend.generate(PROMPT, sampling)) for sampling in drawn]
        assert {(output.version_start, output.version_end) for output in outputs} == {(version, version)}
        rows = []
        for output in outputs:
            count = len(output.output_ids)
            advantage = sum(token < 128 for token in output.output_ids) / count - 0.5
            mask, logprobs = (0,) * len(PROMPT) + (1,) * count, (0.0,) * len(PROMPT) + output.output_logprobs
            ids = PROMPT + output.output_ids
            rows.append(TrainRow(ids, mask, logprobs, advantages=(advantage,) * len(ids)))
        known = engine.logprobs(rows)
        largest += [
            abs(one - other)
            for output, trained in zip(outputs, known, strict=True)
            for one, other in zip(output.output_logprobs, trained, strict=True)
        ]
        stepped = engine.step(rows)
        assert stepped["log_ratio_max"] < GATE
        assert engine.logprobs(rows) != known
    print(f"greatest difference of {len(largest)} tokens: {max(largest):.2g}")
    assert max(largest) < GATE


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: Start) -> Command:
    """The command in this process, where the start lies, with its configuration."""
    monkeypatch.chdir(start.folder)
    command = command_in_process(monkeypatch, capsys)
    return lambda *words: command(*words[:2], *SETTINGS, *words[2:])


def test_the_command_survives_a_kill(harness1: Command, url: str, start: Start) -> None:
    begun = ("--data", "world", "--index", "index", "--model", "hf:start", "--out", "better")
    more = (f"train.lora.rank={RANK}", "rl.batches=3", "train.save_every=1", "machine.service.reduction=row_mean")
    settings = [word for each in more for word in ("--set", each)]
    words = ("rl", "train", *SETTINGS, *begun, *settings, "--engine", f"tinker:{start.folder / 'start'}@{url}")
    out = start.folder / "better"
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with (start.folder / "killed.log").open("wb") as log:
        killed = subprocess.Popen(
            [sys.executable, "-m", "harness1", *words],
            cwd=start.folder,
            env=os.environ | {"PYTHONPATH": path},
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + WAITS_S
        while not (out / STATE).exists():
            assert killed.poll() is None, "the learner ended"
            assert time.monotonic() < deadline, "the learner is too slow"
            time.sleep(0.1)
    finally:
        killed.kill()
        killed.wait()
    assert killed.returncode == -signal.SIGKILL
    (first,) = [line for line in read_log(out) if line["step"] == 1 and "loss" in line]
    ended = harness1(*words[:2], *words[2 + len(SETTINGS) :])
    assert ended.code == 0, ended.err
    lines = [line for line in read_log(out) if "loss" in line]
    assert (lines[0], [line["step"] for line in lines]) == (first, [1, 2, 3])
    assert lines[0]["gate/max_difference"] < GATE
    versions = {episode.policy_versions for episode in read_episodes(out / EPISODES) if episode.group_id}
    assert {(0, 0), (1, 1), (2, 2)} <= versions
    card = read_checkpoint(out)
    assert card.remote.startswith("tinker://")
    shown = ("gate/max_difference", "k3", "reward", "seconds")
    print(*({name: line.get(name) for name in shown} for line in lines), sep="\n")
