"""`scripts/gpu_train.sh` at toy size: from a random model to the table of results, by the commands that a GPU runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness1.models.checkpoint import read_checkpoint
from harness1.runs.store import read_episodes
from tests.sft.test_overfitting import WORLD, save_hearer

pytestmark = pytest.mark.service
ROOT = Path(__file__).parent.parent
TASKS = 40
"""Of a teacher: enough to act validly now and then on others."""
ENV = (
    *("env.max_turns=3", "env.context_window=1024", "env.generation_reserve=160", "env.compression.sentences=1"),
    *("env.search.hits=2", "env.auto_populate.documents=2", "policy.format_retries=0", "machine.workers=1"),
    *("machine.threads=1", "machine.model.threads=1", "machine.bootstrap=50"),
)
SFT = ("train.epochs=30", "train.batch_rows=4", "train.rate=4e-3", "train.lora.rank=0", "train.watch.every=0")
GATES = ("sft.gates.recall=0", "sft.gates.near=1", "sft.held_out=0.2", "train.watch.turns=2", "train.watch.rows=2")
RL = (
    *("rl.groups=2", "rl.samples=6", "rl.batches=2", "train.rate=1e-3", "train.lora.rank=0"),
    *("train.watch.every=2", "train.watch.tasks=2", "train.save_every=1"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hearer(tmp_path_factory.mktemp("model"), TASKS, 1024)


def options(flag: str, settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in (flag, setting)]


def script(model: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "gpu_train.sh"), "--out", str(out), "--model", str(model), "--device", "cpu"]
    command += ["--tasks", "2", "--limit", str(TASKS), *options("--set", ENV), *options("--sft-set", (*SFT, *GATES))]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HOME": str(out.parent)}
    return subprocess.run(
        [*command, *options("--rl-set", RL), *more], env=environment, capture_output=True, text=True, check=False
    )


def test_the_script_goes_the_whole_way_and_does_nothing_twice(model: Path, tmp_path: Path) -> None:
    ended = script(model, tmp_path / "runs", WORLD)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for name in ("sft", "rl"):
        assert read_checkpoint(tmp_path / "runs" / name) is not None
    assert len(list(read_episodes(tmp_path / "runs" / "rl" / "episodes"))) >= 16
    lines = ended.stdout.strip().splitlines()
    systems = [line.partition(": ")[0] for line in lines if ": curated_recall " in line]
    assert systems == [f"world-60-{name}" for name in ("base", "rl", "scripted", "sft", "single-shot")]
    assert [line.partition(":")[0] for line in lines[-2:]] == ["sft", "rl"]
    written = (tmp_path / "runs" / "rl" / "model.safetensors").stat().st_mtime_ns
    again = script(model, tmp_path / "runs", WORLD)
    assert again.returncode == 0, again.stderr[-2000:]
    assert (tmp_path / "runs" / "rl" / "model.safetensors").stat().st_mtime_ns == written
    report = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "training_report.py", tmp_path / "runs", "--peak", "1", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(report.stdout)
    assert found["trainings"]["rl"]["tokens_per_second"] > 0
    assert 0 < found["trainings"]["sft"]["share_of_peak"] < 1


def test_wrong_arguments_are_answered_by_the_usage(tmp_path: Path) -> None:
    ended = subprocess.run([ROOT / "scripts" / "gpu_train.sh", "--fast"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--out RUNS" in ended.stderr
