"""The turns of a teacher, tried and counted by one command."""

import json
from pathlib import Path

import pytest

from harness1.data.open import open_source
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.retrieval.build import build_index
from harness1.rl.pivots import read_pivots
from harness1.runs.journal import latest_episodes
from tests.cli.commands import Command
from tests.rl.test_pivots import CONFIG, WORLD

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


def test_a_profile_is_shown_by_tool_or_as_one_object_and_is_not_made_twice(harness1: Command, home: Path) -> None:
    shown = harness1("rl", "pivots", *SHORT, "taught", "--out", "counted", "--model", "random")
    assert all(said in shown.out for said in ("Turns tried by random", "Everything is in counted.")), shown.err
    row = next(line for line in shown.out.splitlines() if line.startswith("all "))
    turns = sum(len(each.turns) for each in latest_episodes(home / "taught").values())
    assert str(turns) in row.split()
    first = harness1("rl", "pivots", *SHORT, "taught", "--out", "counted", "--model", "random", "--json")
    written = (home / "counted" / "pivots.jsonl").stat().st_mtime_ns
    again = harness1("rl", "pivots", *SHORT, "taught", "--out", "counted", "--policy", "random", "--json")
    assert json.loads(first.out) == json.loads(again.out)
    assert json.loads(first.out)["fates"]["all"]["candidates"] == len(read_pivots(home / "counted")) == turns
    assert (home / "counted" / "pivots.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("taught", "--policy", "oracle"), "sees the gold"),
        (("taught", "--policy", "unheard-of"), "there is no policy"),
        (("index", "--policy", "random"), "is not a run folder"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    harness1: Command, home: Path, words: tuple[str, ...], message: str
) -> None:
    ended = harness1("rl", "pivots", *SHORT, *words, "--out", "refused")
    assert (ended.code, message in ended.err) == (2, True), ended.err
    assert not (home / "refused").exists()
