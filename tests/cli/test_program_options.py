"""Options of the program itself: its version, short help, and the completion of a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness1
from harness1.cli.main import app
from tests.cli.commands import command_in_process
from tests.cli.test_lazy_verbs import verbs_of

ROOT = Path(__file__).parent.parent.parent


def harness(*arguments: str, **variables: str) -> str:
    """Run the program under its own name, and return what it prints."""
    code = f"import sys; sys.argv = {['harness1', *arguments]}\nfrom harness1.cli.main import run\nrun()"
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    return done.stdout


def test_the_program_says_its_version() -> None:
    assert harness("--version") == f"harness1 {harness1.__version__}\n"


@pytest.mark.parametrize("verb", [[], ["rl"], *([each.name] for each in verbs_of(app) if each.name in app.commands)])
def test_short_help_is_the_help(
    verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_in_process(monkeypatch, capsys)
    short = command(*verb, "-h")
    assert short.code == 0
    assert short == command(*verb, "--help")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("harness1 se", "search serve"),
        ("harness1 rl ", "check pivots train agents"),
        ("harness1 index ch", "check"),
        ("harness1 index --str", "--strict"),
        ("harness1 search --con", "--config"),
        ("harness1 rl train --mo", "--model"),
    ],
)
def test_a_shell_completes_verbs_and_their_options(typed: str, completed: str) -> None:
    found = harness(_HARNESS1_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(typed.count(" ")))
    assert found.split() == completed.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_this_program(shell: str) -> None:
    assert f"_HARNESS1_COMPLETE=complete_{shell}" in harness(_HARNESS1_COMPLETE=f"source_{shell}")
