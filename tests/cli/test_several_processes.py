"""`torchrun` starts two processes that train together: the first reports, and the other says nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from harness1.models.checkpoint import read_checkpoint
from harness1.runs.files import read_stage
from harness1.training.log import read_log
from tests.cli.test_sft_commands import home, train
from tests.rl.small_start import SETTINGS, small_start

pytestmark = pytest.mark.service
__all__ = ["home"]
ROOT = Path(__file__).parents[2]
LIMIT_S = 500
"""Seconds after which processes count as hanging."""


def launched(folder: Path, *arguments: str, processes: int = 2) -> subprocess.Popen[str]:
    """The command in processes of a launcher, in a working folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "harness1", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str, processes: int = 2) -> tuple[int, str, str]:
    with launched(folder, *arguments, processes=processes) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def weights_in(folder: Path) -> Path:
    """The weights of a checkpoint, or its adapters."""
    (found,) = folder.glob("*.safetensors")
    return found


def test_two_processes_fine_tune_as_one_does_and_print_one_object(home: Path) -> None:
    code, out, err = run(home, *train("shared", "--json"))
    assert (code, err.count("step 0, held out")) == (0, 1), err
    card, alone = read_checkpoint(home / "shared"), read_checkpoint(home / "student")
    assert json.loads(out)["step"] == card.step == alone.step
    losses = [[line["loss"] for line in read_log(home / each) if "loss" in line] for each in ("shared", "student")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    weights = [load_file(weights_in(home / each)) for each in ("shared", "student")]
    assert_close(weights[0], weights[1], rtol=0, atol=1e-3)
    assert run(home, *train("shared", "--json"))[:2] == (0, out)  # finished, so nothing is trained


def test_an_interrupt_ends_all_processes_and_one_alone_goes_on(home: Path) -> None:
    words = train("cut", "--set", "train.epochs=40", "--set", "train.save_every=1", "--set", "train.watch.every=0")
    process, log = launched(home, *words), home / "cut" / "log.jsonl"
    while process.poll() is None and (not log.is_file() or log.read_text().count('"loss"') < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=LIMIT_S)[1]
    stage = read_stage(home / "cut")
    assert stage.status == "interrupted", err
    assert err.count("harness1: interrupted") == 1, err
    done = len(read_log(home / "cut"))
    code, _, err = run(home, *words, processes=1)
    assert code == 0, err
    steps = [line["step"] for line in read_log(home / "cut") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > done


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    small_start(folder)
    return folder


def test_two_processes_learn_from_the_episodes_of_the_first(start: Path) -> None:
    places = ["--data", "world", "--index", "index", "--model", "hf:start", "--out", "better"]
    code, out, err = run(start, "rl", "train", *SETTINGS, *places)
    assert code == 0, err
    assert json.loads(out)["batch"] == 2
    found = read_checkpoint(start / "better")
    assert found.step == 2
    assert load_file(weights_in(start / "better"))
    lines = [line for line in read_log(start / "better") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["gate/max_difference"] < 1e-4  # sharded, the model is the one that played
