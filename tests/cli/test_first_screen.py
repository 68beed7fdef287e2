"""What a newcomer reads first: a dozen verbs under four headings, all of them on request, and every policy by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness1.cli.main import app
from harness1.policy.registry import NAMES
from tests.cli.commands import Command, command_in_process
from tests.cli.test_lazy_verbs import ROOT, verbs_of


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def listed(screen: str) -> dict[str, list[str]]:
    """The verbs of a list by their heading."""
    found: dict[str, list[str]] = {}
    for line in screen.splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            verbs = found.setdefault(heading[1], [])
        elif verb := re.match(r"  (\S+(?: \S+)?)  +\S", line):
            verbs.append(verb[1])
    return found


def test_the_first_screen_has_a_dozen_verbs_for_four_ends(harness1: Command) -> None:
    screen = harness1("--help").out
    groups = listed(screen)
    del groups["Options"]
    assert [*groups] == ["Use", "Measure", "Train", "Serve"]
    verbs = [verb for group in groups.values() for verb in group]
    assert len(verbs) <= 12
    assert {"index", "search", "view", "eval", "compare", "recipe", "serve"} <= {*verbs}
    assert "`harness1 help` lists every verb" in screen


def test_help_lists_every_verb_those_of_groups_too(harness1: Command) -> None:
    below = {
        f"{name} {each}" for name, verb in app.commands.items() for each in getattr(verb, "commands", None) or verb.more
    }
    verbs = [verb for group in listed(harness1("help").out).values() for verb in group]
    assert sorted(verbs) == sorted({*app.commands, *below})
    assert len([*verbs_of(app)]) < len(verbs)


def test_help_explains_a_verb_as_the_verb_does(harness1: Command) -> None:
    assert harness1("help", "rl", "export") == harness1("rl", "export", "--help")
    assert harness1("help", "serch").code == 2


@pytest.mark.parametrize("verb", ["search", "eval", "sft collect", "rl pivots", "models new"])
def test_the_help_of_a_verb_names_every_policy(verb: str, harness1: Command) -> None:
    said = "".join(harness1(*verb.split(), "--help").out.split())  # a line may end at a hyphen
    assert "".join(f"{', '.join(NAMES)}, quick or trained.".split()) in said


def test_the_help_of_a_verb_names_the_policies_of_other_packages(tmp_path: Path) -> None:
    metadata = tmp_path / "louder-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: louder\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[harness1.policies]\nmegaphone = louder:never_imported\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "harness1", "search", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert "megaphone" in done.stdout
