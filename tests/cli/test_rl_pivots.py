"""The turns of a teacher, tried and counted by one command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from harness1.cli.rl_check import pivots
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.retrieval.build import build_index
from harness1.rl.pivots import read_pivots
from harness1.runs.journal import latest_episodes
from tests.rl.test_pivots import CONFIG, WORLD

Command = Callable[..., Result]
SHORT = ["--set", "machine.workers=1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rl_pivots")
    source = open_source(WORLD)
    build_index(source.documents(), made / "index", CONFIG.index)
    chosen = source.tasks("train")[:4]
    teaching = Evaluation(WORLD, "train", chosen, str(made / "index"), "oracle-teacher", CONFIG)
    evaluate(teaching, made / "taught", lambda _done, _all: None, lambda _episode: None)
    return made


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, home: Path) -> Command:
    """The verb alone, in the working folder of the tests."""
    monkeypatch.chdir(home)
    app = typer.Typer()
    app.command()(pivots)
    return lambda *words: CliRunner().invoke(app, [*words, *SHORT], env={"COLUMNS": "200"})


def test_a_profile_is_shown_by_tool(command: Command, home: Path) -> None:
    ended = command("taught", "--out", "shown", "--policy", "random")
    assert ended.exit_code == 0, ended.exception
    assert "Turns tried by random" in ended.stdout
    assert "Everything is in shown." in ended.stdout
    turns = sum(len(each.turns) for each in latest_episodes(home / "taught").values())
    assert len(read_pivots(home / "shown")) == turns
    row = next(line for line in ended.stdout.splitlines() if line.startswith("all "))
    assert str(turns) in row.split()


def test_a_profile_prints_one_object_of_its_counts_and_is_not_made_twice(command: Command, home: Path) -> None:
    first = command("taught", "--out", "counted", "--model", "random", "--json")
    written = (home / "counted" / "pivots.jsonl").stat().st_mtime_ns
    again = command("taught", "--out", "counted", "--policy", "random", "--json")
    assert json.loads(first.stdout) == json.loads(again.stdout)
    assert json.loads(first.stdout)["fates"]["all"]["candidates"] == len(read_pivots(home / "counted"))
    assert (home / "counted" / "pivots.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("taught", "--policy", "oracle"), "sees the gold"),
        (("taught", "--policy", "unheard-of"), "there is no policy"),
        (("index", "--policy", "random"), "is not a run folder"),
    ],
)
def test_what_cannot_be_profiled_is_refused(command: Command, home: Path, words: tuple[str, ...], message: str) -> None:
    ended = command(*words, "--out", "refused")
    assert isinstance(ended.exception, UsageError)
    assert message in str(ended.exception)
    assert not (home / "refused").exists()
