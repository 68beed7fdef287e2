"""harness1 eval: ablations, and what a user is told about a run."""

from pathlib import Path

import msgspec
import pytest

from harness1.cli.evaluate import ablation_names
from harness1.eval.ablations import ABLATIONS, AblationTable
from tests.cli.commands import Command
from tests.eval.run_folders import write_beir

QUICK = ("--set", "machine.workers=1", "--cache", "cache")


CORPUS = [
    {"_id": "tea leaves", "title": "", "text": "Green tea is brewed at 80 degrees."},
    {"_id": "d2", "title": "", "text": "Coffee is hot."},
]


def test_the_table_is_printed_with_its_verdict(harness1: Command) -> None:
    asked = ("eval", "world:60", "--limit", "2", "--ablations", "grep, dedup", *QUICK)
    done = harness1(*asked)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["scripted", "on", "world:60/test,", "2", "tasks,", "seed", "0"]
    assert [lines[1].split()[0], lines[2].split()[0]] == ["condition", "base"]
    assert "Nothing changes without: grep, dedup." in done.out
    assert "Here helps: none; does not help (the interval contains 0): grep, dedup" in " ".join(done.out.split())
    assert lines[-1] == "Everything is in runs/world-60-0-test-scripted-ablations."
    said = [line for line in done.err.splitlines() if "condition" in line]
    assert said == [f"harness1: condition {at} of 3: {name}" for at, name in enumerate(("base", "grep", "dedup"), 1)]
    again = harness1(*asked, "--json")
    table = msgspec.json.decode(again.out, type=AblationTable)
    assert ([each.name for each in table.conditions], again.err) == (["base", "grep", "dedup"], "")


def test_all_stands_for_every_ablation() -> None:
    assert ablation_names("all") == tuple(ABLATIONS)
    assert ablation_names("grep,read") == ("grep", "read")
    assert sorted(ablation_names("review, all")) == sorted(ABLATIONS)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ablations", "hope"), "unknown ablation 'hope'"),
        (("--ablations", "grep", "--out", "run", "--force"), "choose another --out"),
        (("--out", "/proc/run", "--force"), "/proc/run"),
        (("--force", "--rescore"), "choose one"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(harness1: Command, arguments: tuple[str, ...], word: str) -> None:
    Path("run").mkdir()
    Path("run/mine.txt").write_text("mine")
    failed = harness1("eval", "world:60", "--limit", "1", *arguments, *QUICK)
    assert (failed.code, word in failed.err.splitlines()[-1]) == (2, True), failed.err


def test_ids_with_white_space_do_not_stop_a_run(harness1: Command, tmp_path: Path) -> None:
    write_beir(tmp_path / "data", CORPUS, {"q 1": "How hot is green tea?"}, {"tea leaves": 1}, "test")
    done = harness1("eval", "data", "--out", "out", "--limit", "50", *QUICK)
    assert (done.code, "harness1: data has 1 tasks in split test, not 50" in done.err) == (0, True), done.err
    assert "all are percent-encoded" in " ".join(done.out.split())
    assert "q%201 Q0 tea%20leaves 1 " in (tmp_path / "out" / "curated.trec").read_text()
    assert harness1("eval", "data", "--out", "other", "--policy", "oracle", "--json", *QUICK).code == 0


def test_a_dataset_without_gold_cannot_be_evaluated(harness1: Command, tmp_path: Path) -> None:
    write_beir(tmp_path / "data", CORPUS, {"q1": "?"}, {"tea leaves": 0}, "test")
    for arguments in (("data",), ("data", "--ablations", "grep")):
        failed = harness1("eval", *arguments, "--out", "out", *QUICK)
        assert failed.code == 2
        assert failed.err.splitlines()[-1] == "harness1: data has no tasks in split test"
        assert not (tmp_path / "out").exists()
