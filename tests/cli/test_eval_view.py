"""`harness1 eval` writes a viewer file beside its report."""

import re
from pathlib import Path
from urllib.parse import unquote

from tests.cli.commands import Command
from tests.viewer.test_pages import opened

FEW = ("--limit", "20", "--set", "machine.workers=1", "--set", "env.max_turns=3")


def evaluate(harness1: Command, *options: str) -> None:
    ended = harness1(
        "eval", "world:60", "--split", "train", "--out", "run", "--cache", "cache", "--json", *FEW, *options
    )
    assert ended.code == 0, ended.err


def test_the_report_leads_to_episodes_that_the_viewer_file_holds(harness1: Command) -> None:
    evaluate(harness1)
    links = {unquote(each) for each in re.findall(r'href="view\.html#0/([^"]+)"', Path("run/report.html").read_text())}
    rows = opened(Path("run/view.html"))["rows"]
    assert links == {row["episode"] for row in rows if row["held"]}
    assert len(links) == 16
    assert len(rows) == 20, "the others are listed"


def test_the_file_can_be_left_out_is_made_later_and_does_not_outlive_its_episodes(harness1: Command) -> None:
    evaluate(harness1, "--no-view")
    assert not Path("run/view.html").exists()
    evaluate(harness1)
    made = Path("run/view.html").stat()
    evaluate(harness1)
    assert Path("run/view.html").stat().st_mtime_ns == made.st_mtime_ns, "a finished run leaves it alone"
    for option in ("--force", "--rescore"):
        Path("run/view.html").write_text("old")
        evaluate(harness1, "--no-view", option)
        assert not Path("run/view.html").exists(), option
