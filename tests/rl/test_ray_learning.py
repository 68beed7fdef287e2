"""Learning whose episodes are played by workers of a Ray cluster, each with a model of its own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from harness1.config import Fleet
from harness1.episodes.jobs import EpisodeSetup
from harness1.rl.ray_rollouts import RayRollouts
from harness1.rl.train import Training, train_policy
from harness1.training.log import read_log
from tests.cli.commands import command_in_process
from tests.rl.small_start import SETTINGS, small_start
from tests.rl.toy import Mortal, toy_config, toy_tasks
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.vocabularies import chat_format

pytestmark = pytest.mark.ray


def test_a_policy_learns_over_a_cluster_that_loses_a_worker(tmp_path: Path) -> None:
    base = save_tiny_model(save_byte_tokenizer(tmp_path / "base"), initializer_range=0.05)
    tasks, config = toy_tasks(12), toy_config(["rl.staleness=1", "rl.batches=20"])
    work = Training(tasks[:8], tasks[8:], [EpisodeSetup(config, "", "hf:toy")], base, tmp_path / "out", config)
    players = RayRollouts(partial(Mortal, base, tmp_path), Fleet(workers=2), 8)
    train_policy(work, players, chat_format("compact", "chatml"), "toy", lambda _batch, _batches, _values: None)
    lines = read_log(tmp_path / "out")
    before, after = (line["held_out/reward"] for line in lines if "held_out/reward" in line)
    steps = [line for line in lines if "loss" in line]
    assert after - before > 0.2
    assert (tmp_path / "died").exists()
    assert players.lost == 1
    assert steps[-1]["groups/trained"] == 80
    assert max(line["staleness_max"] for line in steps) <= 1


def test_the_command_learns_from_workers_with_a_policy_and_an_index_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small_start(tmp_path)
    monkeypatch.chdir(tmp_path)
    harness1 = command_in_process(monkeypatch, capsys)
    places = ("--data", "world", "--index", "index", "--model", "hf:start", "--out", "better")
    fleet = ("--set", "machine.fleet.workers=2", "--set", "rl.staleness=1")
    ended = harness1("rl", "train", *places, *SETTINGS, *fleet)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["batch"] == 2
    steps = [line for line in read_log(tmp_path / "better") if "loss" in line]
    assert steps[0]["gate/max_difference"] < 1e-4
    assert steps[-1]["groups/trained"] == 8
    assert max(line["staleness_max"] for line in steps) <= 1
