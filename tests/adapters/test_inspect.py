"""The Inspect task in a real `inspect eval`: scores, model events, faults. Run by `make test-adapters`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness1.config import load_config
from harness1.episodes.rollout import replay_episode
from harness1.errors import UsageError
from harness1.runs.journal import read_episodes
from tests.adapters.peers import chat_server, harness1, scratch_index

inspect_ai = pytest.importorskip("inspect_ai", reason="inspect_ai is not installed")

TASK = "harness1/search"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scratch_index(tmp_path_factory.mktemp("inspect"))


def log_of(
    folder: Path, address: str, index: str, settings: str = "reward.recipe=robust", *options: str
) -> dict[str, Any]:
    """Run `inspect eval` outside the repository, where only an installed task is found, and return its log."""
    words = [str(Path(sys.executable).parent / "inspect"), "eval", TASK, "--model", "openai-api/local/fake"]
    for each in ("data=world:120", f"index={index}", "limit=3", f"settings={settings}", *options):
        words += ["-T", each]
    words += ["--log-dir", str(folder), "--log-format", "json", "--display", "none", "--no-fail-on-error"]
    env = os.environ | {"LOCAL_BASE_URL": address, "LOCAL_API_KEY": "none"}
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=env, cwd=folder.parent)
    logs = list(folder.glob("*.json"))
    assert logs, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(logs[0].read_text())
    return found


def test_scores_are_those_of_an_evaluation_and_every_turn_is_a_model_event(tmp_path: Path, index: Path) -> None:
    with chat_server() as address:
        log = log_of(tmp_path / "log", address, str(index))
        run = tmp_path / "run"
        policy = ("--policy", f"openai:fake@{address}", "--set", "reward.recipe=robust")
        harness1("eval", "world:120", "--index", str(index), "--limit", "3", *policy, "--out", str(run))
    rows = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    expected = {row["task"]["task_id"]: row["reward"]["total"] for row in rows}
    assert len(log["samples"]) == 3
    for sample in log["samples"]:
        scores = sample["scores"]["search_scores"]
        assert scores["value"]["reward"] == pytest.approx(expected[sample["id"]])
        assert {"recall", "precision", "f1"} <= scores["value"].keys()
        assert sum(event["event"] == "model" for event in sample["events"]) == 3
        seen = {name: sample[name] for name in ("input", "target", "metadata", "store")}
        assert (seen["metadata"], seen["target"]) == ({}, ""), "what other solvers of a chain see"
        assert not any(word in json.dumps(seen) for word in ("gold", "relevant", '"reward"'))


def test_recorded_episodes_replay_to_the_hash_and_have_the_scores(tmp_path: Path, index: Path) -> None:
    settings = "reward.recipe=robust env.rendering.order=transcript"
    with chat_server() as address:
        log = log_of(tmp_path / "log", address, str(index), settings, "record=run")
    harness1("replay", str(tmp_path / "run"))
    episodes = {each.task.task_id: each for each in read_episodes(tmp_path / "run")}
    config = load_config(None, settings.split())
    for sample in log["samples"]:
        episode = episodes.pop(sample["id"])
        report = replay_episode(episode, config.env)
        assert (report.difference, report.equal) == (None, 3)
        assert episode.reward.total == sample["scores"]["search_scores"]["value"]["reward"]
    assert not episodes


def test_a_record_needs_the_dataset_of_its_samples(index: Path, tmp_path: Path) -> None:
    from harness1.adapters.inspect_task import search_solver

    with pytest.raises(UsageError, match="`record` needs `dataset`"):
        search_solver(str(index), load_config(None, []), record="run")
    solver = search_solver(str(index), load_config(None, []), record=str(tmp_path / "run"), dataset="world:120")
    task = inspect_ai.Task([inspect_ai.dataset.Sample(input="who?", id="alien")], solver=solver)
    options: dict[str, Any] = {"log_dir": str(tmp_path), "display": "none", "fail_on_error": False}
    (log,) = inspect_ai.eval(task, model="mockllm/model", **options)
    assert "world:120 has no task alien with gold in test" in log.samples[0].error.message


def test_a_dead_index_is_an_error_of_the_sample_and_no_zero(tmp_path: Path) -> None:
    with chat_server() as address:
        log = log_of(tmp_path, address, "http://127.0.0.1:9", "machine.attempts=1 machine.call_deadline_s=2")
    for sample in log["samples"]:
        assert sample["error"]
        assert not sample.get("scores")
