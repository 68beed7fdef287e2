"""Learning in the real environment, from a start made on the spot: `benchmarks/learn.py` in a shorter form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.learn import learned
from benchmarks.micro import MICRO, TAUGHT, Start, make
from harness1.config import load_config
from harness1.replay import replay_episode
from harness1.rl.learning import EPISODES
from harness1.store import read_episodes
from harness1.train.log import read_log
from harness1.training_settings import Watch

SHORT = (
    *("run.workers=1", "run.threads=1", "run.model.threads=1", "run.bootstrap=50", "train.rate=1e-3"),
    *("rl.groups=8", "rl.batches=8", "train.watch.every=8", "train.watch.tasks=60", "train.save_every=0"),
)
GAIN = 0.3
"""Of a reward that begins near 0.3 and whose bound is about 2.4."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a small model became that had seen a mediocre teacher for a few hundred episodes."""
    taught = msgspec.structs.replace(TAUGHT, watch=Watch(every=0, rows=0, turns=8, metric="valid"))
    config = load_config(MICRO, list(SHORT))
    folder = tmp_path_factory.mktemp("micro")
    start = Start(folder, config, size=300, samples=6, words=3000, width=64, layers=2, taught=taught)
    make(start)
    return learned(start, 0, None)


def test_a_policy_earns_more_on_tasks_that_it_never_saw(out: Path) -> None:
    before, after = (each["held_out/reward"] for each in read_log(out) if "held_out/reward" in each)
    assert after - before > GAIN


def test_it_was_trained_on_what_it_had_sampled(out: Path) -> None:
    steps = [each for each in read_log(out) if "loss" in each]
    assert len(steps) == 8
    assert all(each["k3"] < 1e-6 and each["staleness_max"] == 0 for each in steps)
    assert steps[-1]["groups/trained"] == 64


def test_every_episode_that_it_played_can_be_replayed(out: Path) -> None:
    env = load_config(MICRO, list(SHORT)).env
    reports = [replay_episode(episode, env) for episode in list(read_episodes(out / EPISODES))[::20]]
    assert len(reports) > 25
    assert all(report.difference is None and report.equal == report.turns > 0 for report in reports)
