"""Every command of the README and the guides is one that the program has, with options, settings and configurations
that exist; configurations load and code runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness1.cli.main import app
from harness1.config import load_config
from tests.docs.blocks import PAGES, ROOT, blocks, shell

COMMANDS = sorted({command for page in PAGES for command in shell(page)})
OWN = [command for command in COMMANDS if command.startswith("harness1 ")]
OTHERS = ("git clone ", "cd ", "docker ", "pip install ", "make ", "pre-commit ", "torchrun ")
"""Programs of others, which say themselves what is wrong with a command."""
LOADED = ("web.toml",)
"""Configurations that the guides tell the reader to write."""


def plain(command: str) -> list[str]:
    """The words of a command with its placeholders of grammar replaced: `RUN...`, `[--live]`, `--limit N`."""
    words = shlex.split(re.sub(r"\[(--\w+)\]", r"\1", command).replace("...", ""))
    return ["3" if word == "N" else word for word in words]


def parsed(command: str) -> dict[str, Any]:
    words = plain(command)[1:]
    verbs: Any = app
    name = "harness1"
    while hasattr(verbs, "commands"):
        name, words, verbs = words[0], words[1:], verbs.commands[words[0]]
    found: dict[str, Any] = verbs.make_context(name, words).params
    return found


@pytest.mark.parametrize("command", OWN)
def test_a_command_is_one_that_the_program_has(command: str) -> None:
    options = [name for each in app.params for name in each.opts]
    if command.removeprefix("harness1 ") in options:
        return
    given = parsed(command)
    named = given.get("config")
    load_config(None if named in LOADED else named, list(given.get("overrides") or ()))


def test_a_misspelt_option_setting_or_configuration_would_be_noticed() -> None:
    for wrong in ("eval d --limits 3", "evaluate d", "eval d --limit many"):
        with pytest.raises((Exception, SystemExit)):
            parsed(f"harness1 {wrong}")
    given = parsed("harness1 eval d --config smal --set env.max_turn=4")
    with pytest.raises(Exception, match="smal"):
        load_config(given["config"])
    with pytest.raises(Exception, match="max_turn"):
        load_config(None, given["overrides"])


def test_scripts_and_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in set(COMMANDS) - set(OWN):
        words = command.split()
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), command
        elif words[0] == "--set":
            load_config(None, words[1::2])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), command
        else:
            assert command.startswith(
                (*OTHERS, "python -m torch", "python -m harness1.adapters.", "VLLM_", "OPENAI_", "ANTHROPIC_", "vllm ")
            ), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_load(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            (tmp_path / "written.toml").write_text("\n".join(block.lines))
            load_config(tmp_path / "written.toml")
        assert block.language in ("", "toml", "python", "bash", "sh", "text", "mermaid"), block
