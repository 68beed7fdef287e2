"""`harness1 answer` against a server on loopback that answers from the documents in its prompt."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness1.data.open import open_source
from harness1.eval.answer_run import SUMMARY, TABLE
from harness1.eval.answers import ANSWERS
from harness1.runs.files import read_stage
from tests.cli.commands import Command, Ended, run_in
from tests.serving import imitating

pytestmark = pytest.mark.service

WORLD, TASKS = "world:60", 8
RIGHT = {task.query: task.gold.answers for task in open_source(WORLD).tasks("test") if task.gold}
Made = tuple[int, str]


def reading(system: str, user: str) -> Made:
    """Knows what the answers look like, and says one only if a document holds it."""
    documents, _, rest = user.rpartition("<question>\n")
    known = RIGHT.get(rest.partition("\n</question>")[0], ())
    return 200, next((answer for answer in known if answer in documents), "I do not know")


class Asked(NamedTuple):
    """The address of a server, and what it was asked, in order."""

    url: str
    bodies: list[dict[str, Any]]


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
        yield Asked(f"{url}/v1", bodies)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answered")
    options = ("--limit", str(TASKS), "--set", "machine.workers=1", "--cache", "cache")
    run_in(folder, "eval", WORLD, *options, "--out", "run")
    return folder / "run"


def answering(harness1: Command, run: Path, out: Path, reader: Asked, *more: str) -> Ended:
    return harness1("answer", str(run), "--answerer", f"openai:reader@{reader.url}", "--out", str(out), *more)


def test_curated_sets_beat_closed_book(harness1: Command, run_folder: Path, tmp_path: Path) -> None:
    with model(reading) as reader, model(lambda *_: (200, "correct")) as judge:
        judged = ("--judge", f"openai:judge@{judge.url}", "--json")
        ended = answering(harness1, run_folder, tmp_path / "out", reader, *judged)
        summary = json.loads(ended.out)
        assert (len(reader.bodies), len(judge.bodies)) == (3 * TASKS, 3 * TASKS)
        assert {body["temperature"] for body in reader.bodies + judge.bodies} == {0}
        again = answering(harness1, run_folder, tmp_path / "out", reader, *judged)
        assert (json.loads(again.out), len(reader.bodies)) == (summary, 3 * TASKS), "what is done is not asked again"
    assert json.loads((tmp_path / "out" / SUMMARY).read_bytes()) == summary
    closed, single, curated = (summary["conditions"][name] for name in ("closed", "single", "curated"))
    assert closed["exact_match"]["mean"] == 0.0 < curated["exact_match"]["mean"]
    assert single["documents"] <= curated["documents"]
    assert curated["prompt_tokens"] > closed["prompt_tokens"] > 0
    assert summary["judge"]["model"] == f"openai:judge@{judge.url}"
    assert len((tmp_path / "out" / TABLE).read_text().splitlines()) == 1 + 3 * TASKS


def test_an_answer_that_does_not_come_is_missing_with_exit_code_3_and_is_asked_again(
    harness1: Command, run_folder: Path, tmp_path: Path
) -> None:
    quick = ("--conditions", "closed,curated", "--set", "machine.attempts=2")
    broken = open_source(WORLD).tasks("test")[0].query

    def failing(system: str, user: str) -> Made:
        return (503, "overloaded") if broken in user else reading(system, user)

    with model(failing) as reader:
        url = reader.url
        ended = answering(harness1, run_folder, tmp_path / "out", reader, *quick)
        assert ended.code == 3
        assert all(said in ended.err for said in ("2 answers or verdicts are missing", "overloaded"))
        assert len(reader.bodies) == 2 * TASKS + 2  # both tries of two
    summary = json.loads((tmp_path / "out" / SUMMARY).read_bytes())
    assert (summary["missing"], summary["conditions"]["curated"]["tasks"]) == (2, TASKS - 1)
    assert read_stage(tmp_path / "out").status == "interrupted"
    text = (tmp_path / "out" / ANSWERS).read_text()
    with model(reading) as mended:
        # The server has come back at its old address, as far as the folder knows.
        (tmp_path / "out" / ANSWERS).write_text(text.replace(url, mended.url))
        assert answering(harness1, run_folder, tmp_path / "out", mended, *quick).code == 0
        assert len(mended.bodies) == 2


def test_what_cannot_be_answered_is_refused(harness1: Command, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with model(reading) as reader:
        for run, out, more, said in (
            (run_folder, "out", ("--conditions", "open"), "closed, single, curated"),
            (run_folder, "out", ("--answerer", "hf:somewhere"), "openai:MODEL@URL"),
            (tmp_path, "out", (), "not a run folder"),
            (run_folder, "notes", (), "choose another --out"),
        ):
            ended = answering(harness1, run, tmp_path / out, reader, *more)
            assert (ended.code, said in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err
        assert reader.bodies == []
    assert not (tmp_path / "out").exists()
