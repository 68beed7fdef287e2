"""`harness1 answer` against a server on loopback that answers from the documents in its prompt."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness1.data.open import open_source
from harness1.eval.answer_run import SUMMARY, TABLE
from harness1.eval.answers import ANSWERS
from harness1.runs.files import read_stage
from tests.cli.commands import Command, Ended, command_in_process
from tests.serving import imitating
from tests.support import hear_interrupts

pytestmark = pytest.mark.service

WORLD, TASKS = "world:60", 8
RIGHT = {task.query: task.gold.answers for task in open_source(WORLD).tasks("test") if task.gold}
Made = tuple[int, str]


def reading(system: str, user: str) -> Made:
    """Knows what the answers look like, and says one only if a document holds it."""
    documents, _, rest = user.rpartition("<question>\n")
    known = RIGHT.get(rest.partition("\n</question>")[0], ())
    return 200, next((answer for answer in known if answer in documents), "I do not know")


def judging(system: str, user: str) -> Made:
    correct, answer = (re.findall(rf"<{tag}>\n(.*?)\n</{tag}>", user, re.S)[0] for tag in ("correct", "answer"))
    return 200, "correct" if answer in correct.splitlines() else "Incorrect."


class Asked:
    """What a server was asked: the user messages, in order."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.url, self.bodies = f"{url}/v1", bodies

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][1]["content"] for body in self.bodies]


@contextmanager
def model(says: Callable[[str, str], Made]) -> Iterator[Asked]:
    bodies: list[dict[str, Any]] = []
    lock = threading.Lock()

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        with lock:
            bodies.append(asked)
        assert (method, path) == ("POST", "/v1/chat/completions")
        status, said = says(*(message["content"] for message in asked["messages"]))
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": 3}
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return status, json.dumps({"choices": [choice], "usage": usage, "error": said}).encode()

    with imitating(answer) as url:
        yield Asked(url, bodies)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answered")
    command = [sys.executable, "-m", "harness1", "eval", WORLD, "--limit", str(TASKS), "--set", "machine.workers=1"]
    command += ["--out", str(folder / "run"), "--cache", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / "run"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def answering(command: Command, run: Path, out: Path, reader: Asked, *more: str) -> Ended:
    return command("answer", str(run), "--answerer", f"openai:reader@{reader.url}", "--out", str(out), *more)


def test_curated_sets_beat_closed_book(command: Command, run_folder: Path, tmp_path: Path) -> None:
    with model(reading) as reader, model(judging) as judge:
        judged = ("--judge", f"openai:judge@{judge.url}", "--json")
        ended = answering(command, run_folder, tmp_path / "out", reader, *judged)
        assert ended.code == 0, ended.err
        summary = json.loads(ended.out)
        assert (len(reader.bodies), len(judge.bodies)) == (3 * TASKS, 3 * TASKS)
        assert {body["temperature"] for body in reader.bodies + judge.bodies} == {0}
        assert {body["model"] for body in reader.bodies} == {"reader"}
        again = answering(command, run_folder, tmp_path / "out", reader, *judged)
        assert json.loads(again.out) == summary
        assert len(reader.bodies) == 3 * TASKS  # done: nothing is asked
    assert json.loads((tmp_path / "out" / SUMMARY).read_bytes()) == summary
    closed, single, curated = (summary["conditions"][name] for name in ("closed", "single", "curated"))
    assert closed["exact_match"]["mean"] == 0.0
    assert curated["exact_match"]["mean"] == curated["judge"]["mean"] > 0.0
    assert single["documents"] <= curated["documents"]
    assert curated["prompt_tokens"] > closed["prompt_tokens"] > 0
    assert summary["prompts"]["judge"]["text"] == judge.bodies[0]["messages"][0]["content"]
    assert summary["judge"]["model"] == f"openai:judge@{judge.url}"
    assert len((tmp_path / "out" / TABLE).read_text().splitlines()) == 1 + 3 * TASKS


def test_the_curated_set_goes_out_whole_and_in_delivered_order(
    command: Command, run_folder: Path, tmp_path: Path
) -> None:
    documents = {each.doc_id: each for each in open_source(WORLD).documents()}
    with model(reading) as reader:
        ended = answering(command, run_folder, tmp_path / "out", reader, "--conditions", "curated", "--limit", "2")
        assert ended.code == 0, ended.err
    first = json.loads((run_folder / "episodes.jsonl").read_bytes().splitlines()[0])
    delivered = [entry["unit_id"] for entry in sorted(first["curated"], key=lambda entry: entry["rank"])]
    prompt = next(each for each in reader.prompts if first["task"]["query"] in each)
    texts = re.findall(r"<document>\n(.*?)\n</document>", prompt, re.S)
    assert texts == [f"{documents[name].title}\n{documents[name].text}" for name in delivered]
    assert not any(tag in prompt for tag in ("very_high", "fair"))


def test_an_answer_that_does_not_come_is_missing_with_exit_code_3_and_is_asked_again(
    command: Command, run_folder: Path, tmp_path: Path
) -> None:
    quick = ("--conditions", "closed,curated", "--set", "machine.attempts=2")
    broken = open_source(WORLD).tasks("test")[0].query

    def failing(system: str, user: str) -> Made:
        return (503, "overloaded") if broken in user else reading(system, user)

    with model(failing) as reader:
        url = reader.url
        ended = answering(command, run_folder, tmp_path / "out", reader, *quick)
        assert ended.code == 3
        assert "2 answers or verdicts are missing" in ended.err
        assert "overloaded" in ended.err
        assert len(reader.bodies) == 2 * TASKS + 2  # both tries of two
    summary = json.loads((tmp_path / "out" / SUMMARY).read_bytes())
    assert summary["missing"] == 2
    assert summary["conditions"]["curated"]["tasks"] == TASKS - 1
    card = read_stage(tmp_path / "out")
    assert card.status == "interrupted"
    text = (tmp_path / "out" / ANSWERS).read_text()
    with model(reading) as mended:
        # The server has come back at its old address, as far as the folder knows.
        (tmp_path / "out" / ANSWERS).write_text(text.replace(url, mended.url))
        assert answering(command, run_folder, tmp_path / "out", mended, *quick).code == 0
        assert len(mended.bodies) == 2


def test_a_wrong_key_is_said_at_once(command: Command, run_folder: Path, tmp_path: Path) -> None:
    with model(lambda *_: (401, "no such key")) as reader:
        ended = answering(command, run_folder, tmp_path / "out", reader, "--set", "machine.concurrency=2")
        assert ended.code == 3
        assert "no such key" in ended.err
        assert len(reader.bodies) <= 2


def test_what_cannot_be_answered_is_refused(command: Command, run_folder: Path, tmp_path: Path) -> None:
    with model(reading) as reader:
        wrong = answering(command, run_folder, tmp_path / "out", reader, "--conditions", "open")
        assert (wrong.code, "closed, single, curated" in wrong.err) == (2, True)
        named = command("answer", str(run_folder), "--answerer", "hf:somewhere")
        assert (named.code, "openai:MODEL@URL" in named.err) == (2, True)
        nothing = answering(command, tmp_path, tmp_path / "out", reader)
        assert nothing.code == 2
        assert reader.bodies == []
    assert not (tmp_path / "out").exists()


def test_a_folder_is_refused_before_a_bar_is_shown(command: Command, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with model(reading) as reader:
        ended = answering(command, run_folder, tmp_path, reader)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "choose another --out" in ended.err


def test_an_interrupt_loses_no_answer(run_folder: Path, tmp_path: Path) -> None:
    def slowly(system: str, user: str) -> Made:
        time.sleep(0.15)
        return reading(system, user)

    with model(slowly) as reader:
        answerer = ["--answerer", f"openai:reader@{reader.url}", "--set", "machine.concurrency=2"]
        work = [sys.executable, "-m", "harness1", "answer", str(run_folder), *answerer]
        work += ["--out", str(tmp_path / "out"), "--json"]
        process = subprocess.Popen(
            work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
        )
        path, end = tmp_path / "out" / ANSWERS, time.monotonic() + 60
        while not path.is_file() or len(path.read_bytes().splitlines()) < 5:
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        kept = len(path.read_bytes().splitlines())
        assert 5 <= kept < 3 * TASKS
        before = len(reader.bodies)
        done = subprocess.run(work, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert len(reader.bodies) - before == 3 * TASKS - kept
    assert json.loads(done.stdout)["missing"] == 0
    assert len(path.read_bytes().splitlines()) == 3 * TASKS
