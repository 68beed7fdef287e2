"""Episodes that broke are counted where the reader looks, and decide the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.data.open import open_source
from harness1.episodes import jobs
from harness1.errors import InfrastructureFault, Overflow
from harness1.http import model_endpoint
from harness1.runs.folder import METRICS, REPORT
from harness1.runs.journal import read_episodes
from harness1.viewer.pages import make_episode
from harness1.viewer.run_page import RunSource
from tests.cli.commands import Command, command_in_process

FIRST, SECOND = (task.query for task in open_source("world:60").tasks("test")[:2])
SETTINGS = ("--no-view",)


class Model:
    """An endpoint of a model that searches for the question once; `fails` may raise instead of its second answer."""

    def __init__(self, fails: Callable[[str], None]) -> None:
        self.fails = fails

    async def post(self, path: str, body: Any, kind: type) -> Any:
        asked = json.dumps(body["messages"], ensure_ascii=False)
        question = next(each for each in (FIRST, SECOND) if json.dumps(each, ensure_ascii=False)[1:-1] in asked)
        begun = any(message["role"] == "assistant" for message in body["messages"])
        if begun:
            self.fails(question)
        name, arguments = ("end_search", {}) if begun else ("search_corpus", {"query": question})
        function = {"name": name, "arguments": json.dumps(arguments)}
        message = {"content": None, "tool_calls": [{"id": "c", "function": function}]}
        return msgspec.convert({"choices": [{"message": message, "finish_reason": "tool_calls"}]}, kind)


def fine(question: str) -> None:
    pass


def faulty(question: str) -> None:
    if question == SECOND:
        raise InfrastructureFault("503 busy (3 attempts)")


def down(question: str) -> None:
    raise InfrastructureFault("503 busy (3 attempts)")


def overflowing(question: str) -> None:
    if question == SECOND:
        raise Overflow("400 maximum context length is 8192")


@pytest.fixture
def evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    run: Command = command_in_process(monkeypatch, capsys)
    cache = tmp_path_factory.getbasetemp() / "indexes"

    def evaluate(fails: Callable[[str], None], out: Path, *more: str) -> Any:
        monkeypatch.setattr(model_endpoint, "policy_endpoint", lambda url, machine: Model(fails))
        jobs._policy.cache_clear()  # a process opens a policy once
        monkeypatch.setenv("COLUMNS", "120")
        words = ["world:60", "--limit", "2", "--policy", "openai:m@http://host/v1", "--cache", str(cache)]
        return run("eval", *words, "--out", str(out), *SETTINGS, *more)

    return evaluate


def metrics_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / METRICS).read_text())
    return found


def row_of(shown: str, name: str) -> str:
    """The line of a table that begins with a name, its columns one space apart."""
    return next(" ".join(line.split()) for line in shown.splitlines() if line.startswith(name))


def test_a_fault_is_left_out_counted_and_ends_with_exit_code_3(evaluated: Callable[..., Any], tmp_path: Path) -> None:
    ended = evaluated(faulty, tmp_path)
    assert ended.code == 3
    assert row_of(ended.out, "broken") == "broken 1 of 2 infrastructure, left out of the means"
    assert "1 of the infrastructure: 503 busy (3 attempts)" in ended.out
    assert ended.err.splitlines()[-1] == (
        "harness1: the infrastructure broke 1 of 2 episodes: the same command plays them again, and --allow-faults 1"
        " accepts them"
    )
    metrics = metrics_of(tmp_path)
    reasons = {"503 busy (3 attempts)": 1}
    assert metrics["broken"] == {"infrastructure": {"episodes": 1, "counted": "exclude", "reasons": reasons}}
    assert (metrics["scored"], metrics["faults"]) == (1, "exclude")


def test_where_every_episode_is_broken_the_table_says_so(evaluated: Callable[..., Any], tmp_path: Path) -> None:
    ended = evaluated(down, tmp_path)
    assert ended.code == 3
    assert "No task could be scored." in ended.out
    assert row_of(ended.out, "broken") == "broken 2 of 2 infrastructure, left out of the means"


def test_faults_count_as_0_and_are_allowed_where_that_is_asked(evaluated: Callable[..., Any], tmp_path: Path) -> None:
    allowed = evaluated(faulty, tmp_path, "--allow-faults", "1")
    assert allowed.code == 0
    recall = metrics_of(tmp_path)["curated_recall"]["mean"]
    assert recall > 0.0
    zero = evaluated(faulty, tmp_path, "--faults", "zero", "--allow-faults", "1")
    assert zero.code == 0
    assert row_of(zero.out, "broken") == "broken 1 of 2 infrastructure, counted as 0"
    assert metrics_of(tmp_path)["curated_recall"]["mean"] == recall / 2
    assert (tmp_path / "tasks.csv").read_text().count(",0.0") > 0


def test_the_same_command_plays_broken_episodes_again(evaluated: Callable[..., Any], tmp_path: Path) -> None:
    assert evaluated(faulty, tmp_path).code == 3
    again = evaluated(fine, tmp_path)
    assert (again.code, metrics_of(tmp_path)["broken"]) == (0, {})
    assert "broken" not in again.out


def test_a_prompt_that_is_too_long_scores_0_and_is_no_fault(evaluated: Callable[..., Any], tmp_path: Path) -> None:
    whole = evaluated(fine, tmp_path / "whole")
    ended = evaluated(overflowing, tmp_path / "cut", "--view")
    assert (whole.code, ended.code) == (0, 0)
    assert row_of(ended.out, "broken") == "broken 1 of 2 context limit, counted as 0"
    metrics = metrics_of(tmp_path / "cut")
    assert metrics["broken"] == {"context limit": {"episodes": 1, "counted": "zero"}}
    assert metrics["scored"] == 2
    assert metrics["curated_recall"]["mean"] < metrics_of(tmp_path / "whole")["curated_recall"]["mean"]
    assert "1 of 2 episodes broken: context limit, counted as 0." in (tmp_path / "cut" / REPORT).read_text()


def test_the_report_says_what_the_infrastructure_said(evaluated: Callable[..., Any], tmp_path: Path) -> None:
    evaluated(faulty, tmp_path, "--view")
    page = (tmp_path / REPORT).read_text()
    assert "1 of 2 episodes broken: infrastructure, left out of the means." in page
    assert "503 busy (3 attempts)" in page


def test_ablations_say_where_the_faults_are(evaluated: Callable[..., Any], tmp_path: Path) -> None:
    ended = evaluated(faulty, tmp_path, "--ablations", "dedup")
    assert ended.code == 3
    assert "Episodes that the infrastructure broke: 1 in base, 1 in dedup." in " ".join(ended.out.split())
    assert "the infrastructure broke 2 of 4 episodes (1 in base, 1 in dedup)" in ended.err
    assert evaluated(faulty, tmp_path, "--ablations", "dedup", "--allow-faults", "2").code == 0


def test_a_comparison_says_how_many_pairs_fell_out_and_why(
    evaluated: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, fails, more in (("one", fine, ()), ("two", faulty, ()), ("zero", faulty, ("--faults", "zero"))):
        evaluated(fails, tmp_path / name, *more)
    compare = command_in_process(monkeypatch, capsys)
    excluded = compare("compare", str(tmp_path / "one"), str(tmp_path / "two")).out
    said = "two - one, 1 common tasks (left out: 1 of one and 1 of two; 1 broken by the infrastructure in two)"
    assert said in excluded
    assert row_of(excluded, "two").endswith("2 1")
    counted = compare("compare", str(tmp_path / "one"), str(tmp_path / "zero")).out
    assert "zero - one, 2 common tasks\n" in counted
    assert row_of(counted, "zero").endswith("1 counted as 0")


@pytest.mark.parametrize(("faults", "recall"), [("exclude", []), ("zero", [0.0])])
def test_a_viewer_file_pairs_runs_as_a_comparison_does(
    evaluated: Callable[..., Any], tmp_path: Path, faults: str, recall: list[float]
) -> None:
    evaluated(faulty, tmp_path, "--faults", faults)
    run = RunSource.open(tmp_path)
    made = [make_episode(run, 0, (each, False)) for each in read_episodes(tmp_path) if each.error]
    assert [each.measured["curated_recall"] for each in made if each.measured] == recall


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "world:60", "--limit", "2", "--policy"],
        ["sft", "collect", "--data", "world:60", "--limit", "2", "--teacher"],
    ],
    ids=" ".join,
)
def test_a_server_that_is_not_there_is_an_error_alone(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = command_in_process(monkeypatch, capsys)
    places = ["--out", str(tmp_path / "run"), "--cache", str(tmp_path)]
    ended = run(*words, "openai:m@http://127.0.0.1:9/v1", *places)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.splitlines()[-1] == (
        "harness1: http://127.0.0.1:9/v1/chat/completions: Cannot connect: connection refused (3 attempts); is the"
        " server running, and is this its address?"
    )
    assert "of 2 episodes" not in ended.err
