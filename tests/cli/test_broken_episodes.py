"""Episodes that broke are counted where the reader looks, and decide the exit code."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.data.open import open_source
from harness1.episodes import jobs
from harness1.errors import InfrastructureFault, Overflow
from harness1.http import model_endpoint
from harness1.models import served
from harness1.runs.folder import METRICS, REPORT
from tests.cli.commands import Command, Ended

FIRST, SECOND = (task.query for task in open_source("world:60").tasks("test")[:2])


Fails = Mapping[str, Exception]


class Model:
    """An endpoint of a model that searches for the question once; `fails`: what comes instead of its second answer."""

    def __init__(self, fails: Fails) -> None:
        self.fails = fails

    async def post(self, path: str, body: Any, kind: type) -> Any:
        asked = json.dumps(body["messages"], ensure_ascii=False)
        question = next(each for each in (FIRST, SECOND) if json.dumps(each, ensure_ascii=False)[1:-1] in asked)
        begun = any(message["role"] == "assistant" for message in body["messages"])
        if begun and question in self.fails:
            raise self.fails[question]
        name, arguments = ("end_search", {}) if begun else ("search_corpus", {"query": question})
        function = {"name": name, "arguments": json.dumps(arguments)}
        message = {"content": None, "tool_calls": [{"id": "c", "function": function}]}
        return msgspec.convert({"choices": [{"message": message, "finish_reason": "tool_calls"}]}, kind)


FAULT = InfrastructureFault("503 busy (3 attempts)")
FINE: Fails = {}
FAULTY: Fails = {SECOND: FAULT}


@pytest.fixture
def evaluated(
    harness1: Command, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ended]:
    cache = tmp_path_factory.getbasetemp() / "indexes"

    def evaluate(fails: Fails, *more: str, out: str = "run") -> Ended:
        monkeypatch.setattr(model_endpoint, "policy_endpoint", lambda url, machine: Model(fails))
        monkeypatch.setattr(served, "describe_served", lambda *_: served.ServedModel())
        jobs._policy.cache_clear()  # a process opens a policy once
        words = ["world:60", "--limit", "2", "--policy", "openai:m@http://host/v1", "--cache", str(cache)]
        return harness1("eval", *words, "--out", out, "--no-view", *more)

    return evaluate


def metrics_of(out: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(out) / METRICS).read_text())
    return found


def row_of(shown: str, name: str) -> str:
    """The line of a table that begins with a name, its columns one space apart."""
    return next(" ".join(line.split()) for line in shown.splitlines() if line.startswith(name))


def test_a_fault_is_left_out_counted_told_and_played_again(evaluated: Callable[..., Ended]) -> None:
    ended = evaluated(FAULTY)
    assert ended.code == 3
    assert row_of(ended.out, "broken") == "broken 1 of 2 infrastructure, left out of the means"
    assert "1 of the infrastructure: 503 busy (3 attempts)" in ended.out
    assert ended.err.splitlines()[-1] == (
        "harness1: the infrastructure broke 1 of 2 episodes: the same command plays them again, and --allow-faults 1"
        " accepts them"
    )
    page, metrics = Path("run", REPORT).read_text(), metrics_of()
    assert "1 of 2 episodes broken: infrastructure, left out of the means." in page
    assert "503 busy (3 attempts)" in page
    reasons = {"503 busy (3 attempts)": 1}
    assert metrics["broken"] == {"infrastructure": {"episodes": 1, "counted": "exclude", "reasons": reasons}}
    assert (metrics["scored"], metrics["faults"]) == (1, "exclude")
    again = evaluated(FINE)
    assert (again.code, metrics_of()["broken"], "broken" in again.out) == (0, {}, False)


def test_where_every_episode_is_broken_the_table_says_so(evaluated: Callable[..., Ended]) -> None:
    ended = evaluated({FIRST: FAULT, SECOND: FAULT})
    assert (ended.code, "No task could be scored." in ended.out) == (3, True)
    assert row_of(ended.out, "broken") == "broken 2 of 2 infrastructure, left out of the means"


def test_faults_count_as_0_and_are_allowed_where_that_is_asked(evaluated: Callable[..., Ended]) -> None:
    assert evaluated(FAULTY, "--allow-faults", "1").code == 0
    recall = metrics_of()["curated_recall"]["mean"]
    zero = evaluated(FAULTY, "--faults", "zero", "--allow-faults", "1")
    assert zero.code == 0
    assert row_of(zero.out, "broken") == "broken 1 of 2 infrastructure, counted as 0"
    assert metrics_of()["curated_recall"]["mean"] == recall / 2 > 0.0
    assert Path("run/tasks.csv").read_text().count(",0.0") > 0


def test_a_prompt_that_is_too_long_scores_0_and_is_no_fault(evaluated: Callable[..., Ended]) -> None:
    whole, ended = evaluated(FINE, out="whole"), evaluated({SECOND: Overflow("400 maximum context length is 8192")})
    assert (whole.code, ended.code) == (0, 0)
    assert row_of(ended.out, "broken") == "broken 1 of 2 context limit, counted as 0"
    metrics = metrics_of()
    assert metrics["broken"] == {"context limit": {"episodes": 1, "counted": "zero"}}
    assert metrics["scored"] == 2
    assert metrics["curated_recall"]["mean"] < metrics_of("whole")["curated_recall"]["mean"]
    assert "1 of 2 episodes broken: context limit, counted as 0." in Path("run", REPORT).read_text()


def test_ablations_say_where_the_faults_are(evaluated: Callable[..., Ended]) -> None:
    ended = evaluated(FAULTY, "--ablations", "dedup")
    assert ended.code == 3
    assert "the infrastructure broke 2 of 4 episodes (1 in base, 1 in dedup)" in ended.err
    assert evaluated(FAULTY, "--ablations", "dedup", "--allow-faults", "2").code == 0


def test_a_comparison_says_how_many_pairs_fell_out_and_why(harness1: Command, evaluated: Callable[..., Ended]) -> None:
    for name, fails, more in (("one", FINE, ()), ("two", FAULTY, ()), ("zero", FAULTY, ("--faults", "zero"))):
        evaluated(fails, *more, out=name)
    excluded, counted = harness1("compare", "one", "two").out, harness1("compare", "one", "zero").out
    assert (
        "two - one, 1 common tasks (left out: 1 of one and 1 of two; 1 broken by the infrastructure in two)" in excluded
    )
    assert row_of(excluded, "two").endswith("2 1")
    assert "zero - one, 2 common tasks\n" in counted
    assert row_of(counted, "zero").endswith("1 counted as 0")


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "world:60", "--limit", "2", "--policy"],
        ["sft", "collect", "--data", "world:60", "--limit", "2", "--teacher"],
    ],
    ids=" ".join,
)
def test_a_server_that_is_not_there_is_an_error_alone(harness1: Command, words: list[str]) -> None:
    ended = harness1(*words, "openai:m@http://127.0.0.1:9/v1", "--out", "run", "--cache", "cache")
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.splitlines()[-1] == (
        "harness1: http://127.0.0.1:9/v1/chat/completions: Cannot connect: connection refused (3 attempts); is the"
        " server running, and is this its address?"
    )
    assert "of 2 episodes" not in ended.err
