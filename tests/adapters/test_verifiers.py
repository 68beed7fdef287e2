"""The taskset and harness in a real `vf-eval`: rewards, branches, faults. Run by `make test-adapters`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from harness1.runs.journal import latest_episodes
from tests.adapters.peers import ROLLOUTS, TASKS, branches, chat_server, harness1, scratch_index, traces

vf: Any = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with chat_server() as found:
        yield found


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scratch_index(tmp_path_factory.mktemp("verifiers"))


def test_rewards_are_those_of_an_evaluation(tmp_path: Path, address: str, index: Path) -> None:
    found = traces(tmp_path / "vf", address, str(index))
    assert len(found) == TASKS * ROLLOUTS
    run = tmp_path / "run"
    words = ("eval", "world:120", "--index", str(index), "--limit", str(TASKS), "--policy", f"openai:fake@{address}")
    harness1(*words, "--set", "reward.recipe=robust", "--out", str(run))
    rows = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    expected = {row["task"]["task_id"]: row["reward"]["total"] for row in rows}
    for trace in found:
        assert trace["ok"]
        assert trace["rewards"]["reward"]["score"] == pytest.approx(expected[trace["task"]["data"]["id"]])
        assert {"recall", "f1", "set_size", "reward/outcome"} <= trace["metrics"].keys()
        assert "gold" not in json.dumps(trace["nodes"])
    harness1("replay", str(tmp_path / "vf" / "episodes"))
    kept = latest_episodes(tmp_path / "vf" / "episodes").values()
    assert sorted(each.sample_idx for each in kept) == [*[0] * TASKS, *[1] * TASKS]
    assert {each.episode_id for each in kept} == {trace["info"]["harness1"]["episode_id"] for trace in found}


@pytest.mark.parametrize(("order", "expected"), [("paper", 3), ("epoch", 1)])
def test_a_trainer_gets_one_sequence_for_each_epoch(
    tmp_path: Path, address: str, index: Path, order: str, expected: int
) -> None:
    found = traces(tmp_path / "vf", address, str(index), f'settings = ["env.rendering.order={order}"]', tasks=1)
    assert {len(branches(trace)) for trace in found} == {expected}


def test_a_dead_index_makes_an_error_without_a_reward(tmp_path: Path, address: str) -> None:
    dead = 'settings = ["machine.attempts=1", "machine.call_deadline_s=2"]'
    for trace in traces(tmp_path / "vf", address, "http://127.0.0.1:9", dead, tasks=1):
        assert not trace["ok"]
        assert trace["errors"]
        assert all(value is None for value in trace["rewards"].values())


def test_sixty_four_rollouts_at_once_complete(tmp_path: Path, address: str, index: Path) -> None:
    found = traces(tmp_path / "vf", address, str(index), tasks=16, rollouts=4)
    assert [trace["ok"] for trace in found] == [True] * 64


def test_what_a_trace_keeps_is_scored_like_the_whole_episode(tmp_path: Path, index: Path) -> None:
    import msgspec

    from harness1.adapters.verifiers_env import slim
    from harness1.config import load_config
    from harness1.data.open import open_source
    from harness1.records import Episode
    from harness1.reward import score
    from harness1.runs.journal import read_episodes

    harness1("eval", "world:120", "--index", str(index), "--limit", "6", "--policy", "scripted", "--out", str(tmp_path))
    golds = {task.task_id: task.gold for task in open_source("world:120").tasks("test")}
    for recipe in ("paper", "robust"):
        config = load_config(None, [f"reward.recipe={recipe}"])
        for episode in read_episodes(tmp_path):
            kept = msgspec.convert(json.loads(json.dumps(slim(episode))), Episode)
            gold = golds[episode.task.task_id]
            assert score(kept, gold, config).reward == score(episode, gold, config).reward
            assert len(json.dumps(slim(episode))) < 20_000


def test_the_recipe_for_prime_rl_opens_our_tasks_and_our_harness(tmp_path: Path) -> None:
    from harness1.adapters.verifiers_env import SearchHarness, SearchTaskset
    from harness1.config import load_config

    question = {"question": "Which?", "answer": "A", "type": "bridge", "level": "hard"}
    found = question | {"_id": "h1", "supporting_facts": [["Alpha", 0]], "context": [["Alpha", ["Alpha is a town."]]]}
    (tmp_path / "hotpot_train_v1.1.json").write_text(json.dumps([found]))
    recipe = files("harness1.adapters") / "recipes" / "prime_rl_gpt_oss_20b.toml"
    (source,) = tomllib.loads(recipe.read_text())["orchestrator"]["train"]["source"]
    source["env"]["taskset"]["data"] = source["env"]["taskset"]["data"].replace("FOLDER", str(tmp_path))
    env = vf.load_environment(vf.resolve_env_config(source["env"]))
    assert isinstance(env.taskset, SearchTaskset)
    assert [task.key for task in env.taskset.load()] == ["h1"]
    harness = vf.load_harness(env.config.agent.harness)
    assert isinstance(harness, SearchHarness)
    assert harness._setup.config == load_config("rl/paper", ["policy.format_retries=0"])
    assert harness._setup.retriever.startswith("http://")
    assert env.config.agent.runtime.type == "subprocess"
