"""A verb is imported when it is run or asked for its help; the list of verbs needs none of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness1.cli.main import Verb, Verbs, app

ROOT = Path(__file__).parent.parent.parent


def verbs_of(group: Verbs) -> Iterator[Verb]:
    for verb in group.commands.values():
        if isinstance(verb, Verbs):
            yield from verbs_of(verb)
        else:
            assert isinstance(verb, Verb)
            yield from (verb, *verb.more.values())


def loaded_by(*arguments: str) -> set[str]:
    """Modules of the command line, and packages of others, that a command imports."""
    code = f"import sys; sys.argv = {['harness1', *arguments]}\nfrom harness1.cli.main import run\ntry: run()\n"
    code += "except SystemExit: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("verb", [*verbs_of(app)], ids=lambda verb: verb.target)
def test_a_line_in_the_list_is_what_the_verb_says_of_itself(verb: Verb) -> None:
    assert verb.get_short_help_str(1000) == verb.load().get_short_help_str(1000)


def test_no_line_in_the_list_is_cut() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness1", "help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    words = " ".join(done.stdout.split())
    for name, verb in app.commands.items():
        assert f"{name} {verb.help}" in words


@pytest.mark.parametrize("arguments", [["--help"], ["rl", "--help"], ["sft"], ["serch"]], ids=" ".join)
def test_the_list_of_verbs_imports_none_of_them(arguments: list[str]) -> None:
    modules = loaded_by(*arguments)
    assert {name for name in modules if name.startswith("harness1.cli.")} == {
        "harness1.cli.main",
        "harness1.cli.interrupt",
    }
    assert not modules & {"numpy", "numba", "msgspec", "rich.console"}


def test_the_help_of_a_verb_imports_that_verb() -> None:
    modules = loaded_by("view", "--help")
    assert "harness1.cli.view" in modules
    assert not modules & {"harness1.cli.search", "harness1.cli.rl_train", "numba"}
