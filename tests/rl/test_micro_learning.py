"""Learning in the real environment, from a start made on the spot: `benchmarks/learn.py` in a shorter form."""

from __future__ import annotations

import json
import sys
from typing import Any, cast

import msgspec
import pytest

import harness1 as h
from benchmarks.learn import learned
from benchmarks.micro import MICRO, Start
from harness1.config import Lora, Train, load_config
from harness1.episodes.rollout import replay_episode
from harness1.rl.admission import HEADROOM, read_report
from harness1.rl.pivots import read_pivots
from harness1.rl.train import EPISODES
from harness1.runs.journal import read_episodes
from harness1.training.log import read_log
from tests.cli.commands import Command, command_in_process
from tests.engines.fake_tinker import MODEL, FakeTinker
from tests.rl.small_start import FEW, SETTINGS, SHORT, small_start

pytestmark = pytest.mark.training

GAIN = 0.3  # of a reward that begins near 0.8 and whose bound is about 2.4


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return small_start(tmp_path_factory.mktemp("micro"))


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: Start) -> Command:
    """The command in this process, where the start lies, with its configuration."""
    monkeypatch.chdir(start.folder)
    command = command_in_process(monkeypatch, capsys)
    return lambda *words: command(*words[:2], *SETTINGS, *words[2:])


def test_a_policy_earns_more_on_tasks_that_it_never_saw_and_its_episodes_can_be_replayed(start: Start) -> None:
    out = learned(start, 0)
    before, after = (each["held_out/reward"] for each in read_log(out) if "held_out/reward" in each)
    assert after - before > GAIN
    steps = [each for each in read_log(out) if "loss" in each]
    assert len(steps) == 12
    assert all(each["k3"] < 1e-6 and each["staleness_max"] == 0 for each in steps)
    assert steps[-1]["groups/trained"] == 96
    env = load_config(MICRO, list(SHORT)).env
    reports = [replay_episode(episode, env) for episode in list(read_episodes(out / EPISODES))[::20]]
    assert len(reports) > 25
    assert all(report.difference is None and report.equal == report.turns > 0 for report in reports)


def test_a_checked_dataset_gives_its_admitted_tasks_to_training(harness1: Command, start: Start) -> None:
    asked = ("--index", "index", "--limit", "60", "--tokenizer", "model")
    checked = harness1("rl", "check", "world", *asked, "--out", "check")
    assert checked.code == 0, checked.err
    admitted = frozenset(read_report(start.folder / "check").list_admitted(HEADROOM))
    assert 0 < len(admitted) < 60
    places = ("--data", "world", "--index", "index", "--model", "hf:start", "--out", "on-admitted")
    elsewhere = msgspec.structs.replace(read_report(start.folder / "check"), env_hash="other")
    (start.folder / "elsewhere.json").write_bytes(msgspec.json.encode(elsewhere))
    ended = harness1("rl", "train", *places, "--admission", "elsewhere.json")
    assert ended.code == 2
    assert "another environment: run harness1 rl check with the --config of the training" in ended.err
    ended = harness1("rl", "train", *places, "--admission", "check")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["batch"] == 2
    assert {"reward", "curated_recall"} <= found["start"].keys() & found["metrics"].keys()
    held_out = {task.task_id for task in start.tasks("dev")}
    played = {episode.task.task_id for episode in read_episodes(start.folder / "on-admitted" / EPISODES)}
    assert played - held_out
    assert played - held_out <= admitted


@pytest.mark.ray
def test_workers_of_a_cluster_have_a_policy_and_an_index_of_their_own(harness1: Command, start: Start) -> None:
    places = ("--data", "world", "--index", "index", "--model", "hf:start", "--out", "by-workers")
    ended = harness1("rl", "train", *places, "--set", "machine.fleet.workers=2", "--set", "rl.staleness=1")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["batch"] == 2
    steps = [line for line in read_log(start.folder / "by-workers") if "loss" in line]
    assert steps[0]["gate/max_difference"] < 1e-4
    assert steps[-1]["groups/trained"] == 8
    assert max(line["staleness_max"] for line in steps) <= 1


def test_a_policy_is_trained_from_python_on_a_reward_of_ones_own(start: Start) -> None:
    path = start.folder / "mine.py"
    path.write_text("def few(case):\n    return -len(case.curated) / 30\n")
    values = (each.partition("=") for each in (*SHORT, *FEW))
    settings = {name: msgspec.toml.decode(f"v = {value}")["v"] for name, _, value in values}
    env = h.Env(config=MICRO, settings=settings, reward=[h.reward.recall, (f"{path}:few", 0.5)])
    data = h.load(str(start.folder / "world"))
    better = h.train(env, data, str(start.folder / "start"), start.folder / "from-python", method="cispo")
    terms = {name for each in h.load_run(better).episodes if each.reward for name in each.reward.terms}
    assert (terms, len([each for each in read_log(better) if "loss" in each])) == ({"recall", "few"}, 2)


def test_calls_that_drifted_are_dropped_whole(harness1: Command, start: Start) -> None:
    """The second step of a batch trains on calls that the first has moved away from."""
    settings = ("rl.algorithm=interaction", "rl.rows=epoch", "rl.ratio=[0.95, 1.05]", "rl.substeps=2")
    places = ("--data", "world", "--index", "index", "--model", "hf:start", "--out", "by-calls")
    ended = harness1("rl", "train", *places, *(word for setting in settings for word in ("--set", setting)))
    assert ended.code == 0, ended.err
    steps = [each for each in read_log(start.folder / "by-calls") if "loss" in each]
    assert len(steps) == 2
    assert all(0 < each["clipped"] < 0.5 and each["k3"] > 0 for each in steps)


@pytest.fixture
def oracle(harness1: Command) -> str:
    """A run of the oracle teacher; what is finished is not collected again."""
    collected = ("--teacher", "oracle", "--data", "world", "--index", "index", "--limit", "60")
    taught = harness1("sft", "collect", *collected, "--format", "compact", "--tokenizer", "model", "--out", "oracle")
    assert taught.code == 0, taught.err
    return "oracle"


def test_the_turns_of_a_teacher_are_profiled_and_trained_on(harness1: Command, start: Start, oracle: str) -> None:
    profiled = harness1("rl", "pivots", oracle, "--out", "pivots", "--policy", "hf:start")
    assert profiled.code == 0, profiled.err
    kept = [pivot for pivot in read_pivots(start.folder / "pivots") if pivot.fate == "kept"]
    assert kept
    ended = harness1("rl", "train", "--pivots", "pivots", "--model", "hf:start", "--out", "on-turns")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["batch"] == 2
    played = {episode.task.task_id for episode in read_episodes(start.folder / "on-turns" / EPISODES)}
    assert 0 < len(played) <= len(kept)
    assert played <= {pivot.name for pivot in kept}


def test_turns_are_profiled_and_trained_on_where_a_service_has_the_weights(
    harness1: Command, start: Start, oracle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Train(lora=Lora(rank=4), dtype="float32")
    monkeypatch.setitem(sys.modules, "tinker", cast(Any, FakeTinker(start.folder / "start", train)))
    service = ("--engine", f"tinker:{MODEL}@http://localhost:1", "--set", "train.lora.rank=4")
    profiled = harness1("rl", "pivots", oracle, "--policy", "hf:start", "--out", "pivots-there", *service)
    assert profiled.code == 0, profiled.err
    words = ("rl", "train", "--pivots", "pivots-there", "--model", "hf:start", "--set", "train.save_every=1")
    elsewhere = harness1(*words, "--out", "on-turns-here", "--set", "train.lora.rank=4")
    assert elsewhere.code == 2
    assert "these differ: the weights" in elsewhere.err
    ended = harness1(*words, "--out", "on-turns-there", *service)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["batch"] == 2
    lines = [each for each in read_log(start.folder / "on-turns-there") if "loss" in each]
    assert lines[0]["gate/max_difference"] < 1e-5
    played = [each for each in read_episodes(start.folder / "on-turns-there" / EPISODES) if each.group_id]
    assert {each.policy_versions for each in played} >= {(0, 0), (1, 1)}
    kept = {pivot.name for pivot in read_pivots(start.folder / "pivots-there") if pivot.fate == "kept"}
    assert {each.task.task_id for each in played} <= kept
    refused = harness1("eval", "world", "--index", "index", "--policy", "hf:on-turns-there", "--out", "measured")
    assert refused.code == 2
    assert "are with a training service, as tinker://" in refused.err
