"""Test `harness1 rl agents`: it trains the model behind an agent, resumes, and refuses what it cannot do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from harness1.data.datasets import copy_dataset
from harness1.data.open import open_source
from harness1.models.checkpoint import read_checkpoint
from harness1.rl.train import EPISODES
from harness1.rows.calls import read_records
from harness1.runs.files import read_stage
from harness1.runs.journal import read_episodes
from harness1.training.log import read_log
from tests.cli.commands import Command, command_in_process
from tests.sft.test_fine_tuning import SHORT, WORLD, save_student
from tests.support import hearing, wait_for

AGENT = """
import json, os, urllib.request

body = {"model": "m", "messages": [{"role": "user", "content": open("task.json").read()}], "max_tokens": 12}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
sent = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
urllib.request.urlopen(sent).read()
"""
JUDGE = """
def even(session):
    ids = session.calls[0].output_ids
    return sum(token % 2 == 0 for token in ids) / len(ids)
"""
FEW = (
    *("rl.groups=2", "rl.samples=4", "rl.batches=2", "rl.substeps=1", "rl.rows=turn", "train.watch.tasks=0"),
    *("train.watch.metric=reward", "machine.concurrency=4"),
)
OPTIONS = ["--config", "rl/small", *(word for setting in (*SHORT, *FEW) for word in ("--set", setting))]


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command in this process, beside a model, an agent and a judge."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    save_student(tmp_path / "model")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "judge.py").write_text(JUDGE)
    return command_in_process(monkeypatch, capsys)


def agents(folder: Path, *options: str, command: str = "") -> list[str]:
    command = command or f"{sys.executable} {folder / 'agent.py'}"
    places = ["--data", WORLD, "--upstream", "hf:model", "--out", "out", "--evaluate", "judge.py:even"]
    return ["rl", "agents", "--command", command, *places, *OPTIONS, *options]


def test_the_model_behind_an_agent_is_trained_and_a_training_resumes(harness1: Command, tmp_path: Path) -> None:
    code, _, err = harness1(*agents(tmp_path))
    assert code == 0, err
    steps = [each for each in read_log(tmp_path / "out") if "loss" in each]
    assert len(steps) == 2
    assert all(each["k3"] < 1e-6 for each in steps)
    episodes = list(read_episodes(tmp_path / "out" / EPISODES))
    assert len(episodes) >= 16
    assert {each.policy_versions for each in episodes} >= {(0, 0), (1, 1)}
    assert len(list(read_records(tmp_path / "out" / "sessions"))) >= len(episodes)
    assert harness1(*agents(tmp_path))[0] == 0  # it is done, and played nothing again
    assert len(list(read_episodes(tmp_path / "out" / EPISODES))) == len(episodes)
    code, _, err = harness1(*agents(tmp_path, command="another agent"))
    assert code == 2
    assert "command" in err
    assert read_checkpoint(tmp_path / "out").origins == ("unknown:model", WORLD)
    stage = read_stage(tmp_path / "out")
    assert stage.inputs["evaluate"].startswith("even@")  # and the hash of its file


def test_an_agent_that_always_crashes_ends_the_training_with_its_last_words(harness1: Command, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("raise SystemExit('no module named wonder')")
    code, _, err = harness1(*agents(tmp_path))
    assert code != 0
    assert "no module named wonder" in err


LASTING = """
import os, signal, subprocess, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.path.join(sys.argv[1], f"{os.getpid()} {child.pid}"), "w").close()
time.sleep(600)
"""


@pytest.mark.service
@pytest.mark.usefixtures("harness1")
@pytest.mark.parametrize("sent", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_the_end_of_a_training_ends_stubborn_agents_and_removes_their_folders(
    sent: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    begun, temporary = tmp_path / "begun", tmp_path / "temporary"
    begun.mkdir()
    temporary.mkdir()
    (tmp_path / "agent.py").write_text(LASTING)
    words = agents(tmp_path, "--no-sandbox", command=f"{sys.executable} {tmp_path / 'agent.py'} {begun}")
    process = subprocess.Popen(
        [sys.executable, "-m", "harness1", *words],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hearing(),
    )
    try:
        wait_for(lambda: len(list(begun.iterdir())) == 4)
        assert len(list(temporary.rglob("task.json"))) == 4
        pids = [int(pid) for names in begun.iterdir() for pid in names.name.split()]
        for each in sent:
            process.send_signal(each)
            time.sleep(0.5)
        _, said = process.communicate(timeout=60)
        alive = [pid for pid in pids if is_alive(pid)]
    finally:
        process.kill()
        for names in begun.iterdir():
            with suppress(ProcessLookupError):
                os.killpg(int(names.name.split()[0]), signal.SIGKILL)
    assert process.returncode == 130
    assert "interrupted; the same command continues after batch 0" in said
    assert "Traceback" not in said
    assert alive == []
    assert list(temporary.rglob("task.json")) == []


CURIOUS = """
import glob, sys

def bytes_of(place):
    try:
        with open(place, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""

places = [*glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/mountinfo")]
places += [each for folder in ("..", "../..") for each in glob.glob(f"{folder}/**", recursive=True)]
seen = b" ".join(map(bytes_of, places)) + repr((sys.argv, dict(os.environ))).encode()
for path in ("/v1/models", "/health", "/", "/sessions", "/v1/tasks", "/v1/gold"):
    try:
        seen += urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + path).read()
    except OSError as error:
        seen += str(error).encode()
named = [word for word in ("hf_planted", "--evaluate", "qrels", *GOLD) if word.encode() in seen.replace(HERE, b"")]
named += [place for place in (DATA + "/qrels/train.tsv", OUT + "/checkpoint.json", JUDGE) if bytes_of(place)]
open("found.txt", "w").write(" ".join(named) or "nothing")
"""
SPY = """
import pathlib
def spy(session):
    with pathlib.Path(__file__).with_name("found").open("a") as file:
        file.write(session.read("found.txt") + "\\n")
    ids = session.calls[0].output_ids
    return sum(token % 2 == 0 for token in ids) / len(ids)
"""


@pytest.mark.service
@pytest.mark.usefixtures("harness1")
def test_gold_and_keys_of_a_training_are_not_reachable_from_its_agents(tmp_path: Path) -> None:
    """By no variable, argument, folder, or path of the proxy; also not by those of the trainer."""
    copy_dataset(WORLD, tmp_path / "data")
    gold = [doc_id for task in open_source(WORLD).tasks("train")[:3] for doc_id in task.gold.relevant]
    names = {"GOLD": gold, "DATA": f"{tmp_path}/data", "OUT": f"{tmp_path}/out", "JUDGE": f"{tmp_path}/judge.py"}
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    (tmp_path / "agent.py").write_text(AGENT + head + f"HERE = {str(tmp_path).encode()!r}\n" + CURIOUS)
    (tmp_path / "judge.py").write_text(SPY)
    words = agents(tmp_path, "--data", "data")
    place = words.index("--data")
    words = [*words[:place], *words[place + 2 :]]
    words[words.index("judge.py:even")] = "judge.py:spy"
    secrets = dict.fromkeys(("HF_TOKEN", "ANTHROPIC_AUTH_TOKEN", "HTTP_PROXY"), "hf_planted")
    started = {"env": {**os.environ, **secrets}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-m", "harness1", *words], **started)
    if "of its own; all share" not in done.stderr:
        pytest.skip("this machine permits no namespaces")
    assert done.returncode == 0, done.stderr
    assert set((tmp_path / "found").read_text().split()) == {"nothing"}


def is_alive(pid: int) -> bool:
    """Return False for a process that has ended, also if nobody has asked how."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.training
def test_an_agent_earns_more_by_training(harness1: Command, tmp_path: Path) -> None:
    """One row at a time and no cache: what is sampled does not depend on what is decoded beside it, so not on time."""
    more = ["machine.concurrency=1", "machine.model.cache_tokens=0"]
    more += ["rl.seed=1", "rl.batches=20", "rl.groups=4", "rl.samples=8", "train.rate=1e-2", "train.lora.rank=0"]
    code, _, err = harness1(*agents(tmp_path, *(word for setting in more for word in ("--set", setting))))
    assert code == 0, err
    rewards = [each["reward"] for each in read_log(tmp_path / "out") if "loss" in each]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
