"""A verb is imported when it is run or asked for its help; the list of verbs needs none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness1.cli.main import Verb, Verbs, app
from tests.cli.commands import harness1
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
    assert {name for name in modules if name.startswith("harness1.cli.")} == {"harness1.cli.main"}
    assert not modules & {"numpy", "numba", "msgspec", "rich.console"}


def test_the_help_of_a_verb_imports_that_verb() -> None:
    modules = loaded_by("view", "--help")
    assert "harness1.cli.runs" in modules
    assert not modules & {"harness1.cli.search", "harness1.cli.rl", "numba"}


def test_a_search_by_the_scripted_policy_loads_fewer_than_100_modules_of_ours(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "ada.md").write_text("Ada Lovelace wrote the first program.")
    harness1("index", "notes", "--out", "index", cwd=tmp_path)
    code = "import sys; sys.argv = ['harness1', 'search', 'Who wrote the first program?', '--index', 'index']\n"
    code += "from harness1.cli.main import run\ntry: run()\n"
    code += "except SystemExit: print(*(name for name in sys.modules if name.startswith('harness1')), file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True, env=environment
    )
    assert len(done.stderr.splitlines()[-1].split()) < 100


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


@pytest.mark.parametrize("module", ["starlette", "torch", "httpx"])
def test_the_core_alone_has_no_package_of_an_extra(module: str) -> None:
    done = run_in_core(f"import {module}")
    assert f"No module named '{module}'" in done.stderr


def test_a_verb_without_its_extra_names_it() -> None:
    words = ["rl", "agents", "--command", "a", "--data", "world:60", "--upstream", "hf:nowhere"]
    words += ["--evaluate", "m:f", "--out", "o"]
    done = run_in_core(f"import sys; sys.argv[1:] = {words}\nfrom harness1.cli.main import run\nrun()")
    assert done.returncode == 2
    assert "starlette is not installed" in done.stderr
    assert "[serve]" in done.stderr


DEMO = ROOT / ".venv" / "demo" / "bin" / "python"


@pytest.mark.service
@pytest.mark.skipif(not DEMO.exists(), reason="`make demo` builds an environment of the core alone")
def test_the_help_of_every_verb_works_in_a_core_installation() -> None:
    done = subprocess.run([DEMO, "-c", HELP_OF_ALL], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
