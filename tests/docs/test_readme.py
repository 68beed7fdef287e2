"""The README: short, and its output is what its commands print."""

from __future__ import annotations

import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.commands import command_in_process
from tests.docs.blocks import ROOT, blocks, commands

README = ROOT / "README.md"
HOME = "/home/ada/harness1"
"""Where the README's commands are run."""


def test_it_is_read_in_two_minutes() -> None:
    assert len(README.read_bytes()) <= 5 * 1024
    code = [block for block in blocks(README) if block.language == "python"]
    assert sum(bool(line.strip()) for block in code for line in block.lines) <= 15


def test_the_output_that_it_shows_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "examples" / "notes", tmp_path / "examples" / "notes")
    monkeypatch.chdir(tmp_path)
    harness1 = command_in_process(monkeypatch, capsys)
    found = list(blocks(README))
    pairs = [(before, block) for before, block in pairwise(found) if block.language == "text"]
    assert len(pairs) == 3
    for asked, shown in pairs:
        (command,) = commands(asked)
        ended = harness1(*shlex.split(command)[1:])
        assert ended.code == 0, ended.err
        printed = iter(ended.out.replace(str(tmp_path), HOME).splitlines())
        for line in shown.lines:
            # Any number of lines is left out at "...", and the end of a line at "…".
            begins = line.removesuffix("…")
            same = (each == line or (begins != line and each.startswith(begins)) for each in printed)
            assert line == "..." or any(same), line
