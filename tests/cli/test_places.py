"""Paths are shown as they are, and a place that cannot be written to is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Command, command_in_process


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    return command_in_process(monkeypatch, capsys)


@pytest.mark.parametrize("out", ["a[/x]b", "a[red]b"])
def test_brackets_in_a_path_are_no_markup(command: Command, out: str) -> None:
    ended = command("eval", "world:40", "--limit", "2", "--cache", "cache", "--out", out)
    assert ended.code == 0
    assert f"Everything is in {out}." in ended.out
    assert f"({Path(out).name})" in ended.err
    assert command("index", "world:40", "--out", "index").code == 0
    ended = command("search", "Which river?", "--index", "index", "--out", f"{out}/search")
    assert ended.code == 0
    assert f"recorded in {out}/search" in ended.out.replace("\n", "")


def test_a_cache_that_cannot_be_written_is_one_line(command: Command) -> None:
    # A file where a folder should be: unlike permissions, it stops root too.
    Path("cache").write_text("")
    ended = command("eval", "world:40", "--cache", "cache", "--out", "run")
    assert ended.code == 2
    assert "cache" in ended.err
    assert ended.err.count("\n") == 1
