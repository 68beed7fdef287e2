"""`harness1 compare` as a user meets it."""

import json
import re
from pathlib import Path

import pytest

from harness1.config import Config
from harness1.config.settings import to_record
from tests.cli.commands import Command
from tests.eval.run_folders import dataset, episode, run_folder

QUERIES = {
    f"t{number}": f"Question {number}, which is longer than a line of a terminal has room for?" for number in (1, 2)
}


ROW = r"curated_recall +0\.750 +0\.250 +-0\.500 +-1\.000 to \+0\.000 +1\.000\n"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, harness1: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    data = dataset(tmp_path / "data", QUERIES)
    run_folder(Path("one"), data, [episode("t1", "ab"), episode("t2", "a")])
    run_folder(Path("two"), data, [episode("t1", "x"), episode("t2", "a")], policy="other")


def test_a_pipe_gets_plain_tables_that_fit_a_terminal(harness1: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = harness1("compare", "one", "two")
    assert ended.code == 0
    assert "two - one, 2 common tasks" in ended.out
    assert re.search(ROW, ended.out)
    assert "curated_recall of two, task by task: 0 higher, 1 lower, 1 equal." in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert not set("│┃─━\x1b") & set(ended.out)
    assert "harness1 view one two --out view.html" in ended.out
    monkeypatch.setenv("COLUMNS", "40")
    assert re.search(ROW, harness1("compare", "one", "two").out), "no number is cut"


def test_json_holds_everything_and_nothing_else_is_printed(harness1: Command) -> None:
    found = json.loads(harness1("compare", "one", "two", "--json", "--equal-size").out)
    assert found["equal_size"] is True
    assert found["others"][0]["metrics"]["curated_recall"]["difference"]["mean"] == -0.25  # one document of each
    assert found["view"] == "harness1 view one two --out view.html"


def test_it_is_written_as_markdown_too(harness1: Command) -> None:
    assert harness1("compare", "one", "two", "one", "--out", "table.md", "--top", "1").code == 0
    text = Path("table.md").read_text()
    assert "| metric | run 1 | run 2 | diff | 95 % interval | p (Holm) |" in text
    assert "| curated_recall | 0.750 | 0.250 | -0.500 | -1.000 to +0.000 | 1.000 |" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["one", "nowhere"], "nowhere is not a run folder"),
        (["one", "two", "--metric", "beauty"], "no metric 'beauty'"),
        (["one", "two", "--out", "no/such/folder.md"], "cannot write no/such/folder.md"),
    ],
)
def test_a_mistake_is_told_in_one_line(harness1: Command, arguments: list[str], said: str) -> None:
    ended = harness1("compare", *arguments)
    assert (ended.code, said in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err


def test_a_run_with_a_setting_that_is_gone_is_shown_with_a_notice_and_not_replayed(
    harness1: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = {"watch": {"patience": 3}}  # which decides nothing in a run
    older = to_record(Config(), "") | {"env": {"dedup": {"on": True, "threshold": 0.9}}, "train": trained}
    monkeypatch.setattr("harness1.runs.folder.public_config", lambda _: older)
    run_folder(Path("old"), tmp_path / "data", [episode("t1", "ab"), episode("t2", "a")])
    told = "old was recorded with env.dedup.threshold=0.9 (env.dedup.threshold was removed: it is a constant now"
    shown = harness1("compare", "old", "old")
    assert (shown.code, told in shown.err, "patience" in shown.err) == (0, True, False), shown.err
    refused = harness1("replay", "old")
    assert (refused.code, told in refused.err) == (2, True), refused.err
