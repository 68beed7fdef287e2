"""The agent of the examples searches, chooses and is paid for its choice, and the model behind it is trained."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness1.agents.evaluation import AgentSession, delivered_f1, open_evaluation, reward_of
from harness1.config import load_config
from harness1.data.open import open_source
from harness1.records import DocId, Gold, Task
from harness1.retrieval.build import build_index
from harness1.retrieval.open import open_retriever
from harness1.rl.train import EPISODES
from harness1.runs.journal import read_episodes
from harness1.training.log import read_log
from harness1.training.new_model import Shape, draw
from harness1.viewer.work import read_sessions
from tests.cli.commands import Command, command_in_process
from tests.serving import serving

WORLD = "world:120"
AGENT, REWARD = (Path("examples", name).resolve() for name in ("search_agent.py", "search_reward.py"))
# A model of bytes says some digit in most answers of this length, even with random weights.
SETTINGS = (
    *("policy.format=hermes", "env.context_window=2048", "env.generation_reserve=48"),
    *("rl.groups=2", "rl.samples=4", "rl.batches=2", "train.watch.tasks=0", "machine.concurrency=4"),
    "machine.threads=1",
)
CONFIG = load_config("micro", list(SETTINGS))


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return command_in_process(monkeypatch, capsys)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    build_index(open_source(WORLD).documents(), tmp_path / "index", CONFIG.index)
    with serving(open_retriever(str(tmp_path / "index"), CONFIG), CONFIG) as url:
        yield url


@pytest.mark.service
def test_the_search_agent_is_trained_by_what_it_chose(harness1: Command, tmp_path: Path, address: str) -> None:
    draw(tmp_path / "model", [], Shape(words=256, width=32, layers=2, heads=2), CONFIG, seed=0)
    words = ["--command", shlex.join([sys.executable, str(AGENT), address]), "--evaluate", f"{REWARD}:f1"]
    words += ["--data", WORLD, "--upstream", "hf:model", "--out", "out", "--config", "micro"]
    code, _, err = harness1("rl", "agents", *words, *(word for each in SETTINGS for word in ("--set", each)))
    assert code == 0, err
    assert len([each for each in read_log(tmp_path / "out") if "loss" in each]) == 2
    episodes = list(read_episodes(tmp_path / "out" / EPISODES))
    assert [episode.error for episode in episodes if episode.reward is None] == []
    assert len({episode.reward.total for episode in episodes}) > 1
    sessions = read_sessions(tmp_path / "out" / "sessions")
    assert len(sessions) >= len(episodes)
    assert all([call["status"] for call in session["calls"]] == [200, 200] for session in sessions)
    assert all("Write the numbers" in session["calls"][1]["prompt"] for session in sessions)
    code, _, err = harness1("view", "out/sessions")
    assert code == 0, err
    assert sessions[0]["name"] in (tmp_path / "view.html").read_text()


def test_the_reward_of_the_search_agent_is_f1_of_what_it_delivered(tmp_path: Path) -> None:
    f1 = open_evaluation(f"{REWARD}:f1")
    gold = Gold({DocId("D1"): 1, DocId("D2"): 1, DocId("D3"): 0})
    session = AgentSession(name="s", task=Task("t", "?", "train", gold), folder=tmp_path)
    for delivered, reward in ((None, 0.0), ("", 0.0), ("D3\n", 0.0), ("D1\nD9\nD3\n", 0.4), ("D2\nD1\n", 1.0)):
        if delivered is not None:
            (tmp_path / "delivered.txt").write_text(delivered)
        assert reward_of(f1, session).total == pytest.approx(reward)
        assert reward_of(f1, session).total == pytest.approx(delivered_f1(session))
