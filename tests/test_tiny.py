"""`scripts/tiny.sh` at toy size: the whole pipeline by the commands that a reader sees, and nothing done twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness1.models.checkpoint import read_checkpoint
from harness1.runs.store import read_episodes

SCRIPT = Path(__file__).parent.parent / "scripts" / "tiny.sh"


def tiny(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.service
def test_the_script_goes_the_whole_way_and_does_nothing_twice(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    ended = tiny(str(out), "--toy")
    assert ended.returncode == 0, ended.stderr[-2000:]
    steps = re.findall(r"^\[\d+ min \d\d s\] (\w+)", ended.stdout, re.MULTILINE)
    assert steps[:6] == ["Documents", "Index", "Model", "Teacher", "Rows", "Supervised"]
    assert steps[6:] == ["CISPO", "Evaluation", "What", "View", "Done"]
    assert all(read_checkpoint(out / name) is not None for name in ("sft", "rl"))
    assert len(list(read_episodes(out / "rl" / "episodes"))) >= 2 * 16 * 8
    assert {len(list(read_episodes(out / f"eval-{name}"))) for name in ("sft", "rl", "silent-oracle")} == {20}
    assert "harness1 view RUN..." in ended.stdout.splitlines()[-1]
    results = [path for path in out.rglob("*") if path.name in ("checkpoint.json", "episodes.jsonl")]
    made = {path: path.stat().st_mtime_ns for path in results}
    again = tiny(str(out), "--toy")
    assert again.returncode == 0, again.stderr[-2000:]
    assert {path: path.stat().st_mtime_ns for path in results} == made


def test_wrong_arguments_are_answered_by_the_usage() -> None:
    for arguments in ([], ["out", "--fast"]):
        ended = tiny(*arguments)
        assert ended.returncode == 2
        assert "scripts/tiny.sh OUT [--toy]" in ended.stderr
        assert "PYTHON chooses" in ended.stderr
        assert "set -e" not in ended.stderr
