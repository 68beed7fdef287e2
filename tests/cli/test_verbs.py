"""The list of verbs, which imports none of them, their help, and the options of the program itself."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness1 import __version__
from harness1.cli.main import Verb, Verbs, app
from harness1.policy.registry import NAMES
from tests.cli.commands import Command
from tests.core_alone import run_in_core

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
def test_a_line_in_the_list_is_what_the_verb_says_of_itself_with_an_example(verb: Verb) -> None:
    command = verb.load()
    assert verb.get_short_help_str(1000) == command.get_short_help_str(1000)
    assert "Example: harness1 " in command.help


def test_no_line_in_the_list_is_cut(harness1: Command) -> None:
    words = " ".join(harness1("help").out.split())
    for name, verb in app.commands.items():
        assert f"{name} {verb.help}" in words


@pytest.mark.parametrize("arguments", [["rl", "--help"], ["serch"]], ids=" ".join)
def test_the_list_of_verbs_imports_none_of_them(arguments: list[str]) -> None:
    modules = loaded_by(*arguments)
    assert {name for name in modules if name.startswith("harness1.cli.")} == {"harness1.cli.main"}
    assert not modules & {"numpy", "numba", "msgspec", "rich.console"}


def test_the_help_of_a_verb_imports_that_verb() -> None:
    modules = loaded_by("view", "--help")
    assert "harness1.cli.runs" in modules
    assert not modules & {"harness1.cli.search", "harness1.cli.rl", "numba"}
    assert "jinja2" not in loaded_by("eval", "--help"), "templates are loaded by the first page alone"


def test_a_search_by_the_scripted_policy_loads_fewer_than_100_modules_of_ours(harness1: Command, home: Path) -> None:
    (home / "notes").mkdir()
    (home / "notes" / "ada.md").write_text("Ada Lovelace wrote the first program.")
    harness1("index", "notes", "--out", "index")
    places = ("--index", str(home / "index"), "--out", str(home / "run"))
    modules = loaded_by("search", "Who wrote the first program?", *places)
    assert len([name for name in modules if name.startswith("harness1")]) < 100


HELP_OF_ALL = """
from harness1.cli.main import app
def walk(commands, before):
    for name, verb in commands.items():
        below = getattr(verb, "commands", None) or getattr(verb, "more", {})
        walk(below, [*before, name])
        app([*before, name, "--help"], standalone_mode=False)
walk(app.commands, [])
"""


def test_the_help_of_every_verb_needs_the_core_alone() -> None:
    done = run_in_core(HELP_OF_ALL)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("Usage: ")]
    assert len(printed) >= len([*verbs_of(app)])


def test_a_verb_without_its_extra_names_it() -> None:
    words = ["rl", "agents", "--command", "a", "--data", "world:60", "--upstream", "hf:nowhere"]
    words += ["--evaluate", "m:f", "--out", "o"]
    done = run_in_core(f"import sys; sys.argv[1:] = {words}\nfrom harness1.cli.main import run\nrun()")
    assert (done.returncode, "starlette is not installed" in done.stderr, "[serve]" in done.stderr) == (2, True, True)


def program(*arguments: str, **variables: str) -> str:
    """Run the program under its own name, and return what it prints."""
    code = f"import sys; sys.argv = {['harness1', *arguments]}\nfrom harness1.cli.main import run\nrun()"
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    return done.stdout


def test_the_program_says_its_version(harness1: Command) -> None:
    assert harness1("--version").out == f"harness1 {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("harness1 index ch", "check"),
        ("harness1 rl train --mo", "--model"),
    ],
)
def test_a_shell_completes_verbs_and_their_options(typed: str, completed: str) -> None:
    found = program(_HARNESS1_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(typed.count(" ")))
    assert found.split() == completed.split()


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


@pytest.mark.parametrize("verb", ["search", "sft collect"])
def test_the_help_of_a_verb_names_every_policy(verb: str, harness1: Command) -> None:
    said = "".join(harness1(*verb.split(), "--help").out.split())  # a line may end at a hyphen
    assert "".join(f"{', '.join(NAMES)}, quick or trained.".split()) in said


def test_the_help_of_a_verb_names_the_policies_of_other_packages(tmp_path: Path) -> None:
    metadata = tmp_path / "louder-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: louder\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[harness1.policies]\nmegaphone = louder:never_imported\n")
    assert "megaphone" in program("search", "--help", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
