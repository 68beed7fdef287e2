"""harness1 eval: ablations, and what a user is told about a run."""

import json
from pathlib import Path

import pytest

from harness1.cli.evaluate import ablation_names
from harness1.eval.ablations import ABLATIONS
from harness1.runs.journal import read_episodes
from tests.cli.commands import Command
from tests.eval.run_folders import write_beir

QUICK = ("--set", "machine.workers=1", "--cache", "cache")
CORPUS = [
    {"_id": "tea leaves", "title": "", "text": "Green tea is brewed at 80 degrees."},
    {"_id": "d2", "title": "", "text": "Coffee is hot."},
]


def test_every_condition_is_a_run_of_the_same_tasks_and_is_compared_with_the_base(harness1: Command) -> None:
    asked = ("eval", "world:60", "--limit", "2", "--ablations", "grep, dedup, rank", "--set", "env.evidence.rank=false")
    asked += tuple(f"--set=env.{setting}" for setting in ("auto_populate.by=first", "read.by=order", "leads.on=false"))
    done = harness1(*asked, *QUICK)
    assert done.code == 0, done.err
    assert all(f"{name} - base, 2 common tasks" in done.out for name in ("grep", "dedup"))
    assert "env.dedup.on" in done.out
    assert "skipped, because it is off in the base: rank" in done.err
    said = [line for line in done.err.splitlines() if line.startswith("harness1: condition")]
    assert said == [f"harness1: condition {at} of 3: {name}" for at, name in enumerate(("base", "grep", "dedup"), 1)]
    folders = [Path("runs/world-60-0-test-scripted-ablations") / name for name in ("base", "grep", "dedup")]
    played = [list(read_episodes(folder)) for folder in folders]
    assert len({tuple(sorted((each.task.task_id, each.seed) for each in run)) for run in played}) == 1
    assert len({run[0].hashes.env for run in played}) == 3
    again = harness1(*asked, "--json")
    assert [Path(each["second"]["folder"]).name for each in json.loads(again.out)["others"]] == ["grep", "dedup"]
    assert [len(list(read_episodes(folder))) for folder in folders] == [2, 2, 2], "nothing is played twice"


def test_all_stands_for_every_ablation() -> None:
    assert ablation_names("all") == tuple(ABLATIONS)
    assert ablation_names("grep,read") == ("grep", "read")
    assert sorted(ablation_names("review, all")) == sorted(ABLATIONS)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ablations", "hope"), "unknown ablation 'hope'"),
        (("--ablations", "grep", "--set", "env.grep.on=false"), "nothing is left to take away"),
        (("--out", "/proc/run", "--force"), "/proc/run"),
        (("--force", "--rescore"), "choose one"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(harness1: Command, arguments: tuple[str, ...], word: str) -> None:
    failed = harness1("eval", "world:60", "--limit", "1", *arguments, *QUICK)
    assert (failed.code, word in failed.err.splitlines()[-1]) == (2, True), failed.err


def test_ids_with_white_space_do_not_stop_a_run(harness1: Command, tmp_path: Path) -> None:
    write_beir(tmp_path / "data", CORPUS, {"q 1": "How hot is green tea?"}, {"tea leaves": 1}, "test")
    done = harness1("eval", "data", "--out", "out", "--limit", "50", *QUICK)
    assert (done.code, "harness1: data has 1 tasks in split test, not 50" in done.err) == (0, True), done.err
    assert "all are percent-encoded" in " ".join(done.out.split())
    assert "q%201 Q0 tea%20leaves 1 " in (tmp_path / "out" / "curated.trec").read_text()
