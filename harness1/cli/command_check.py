"""A look at the commands of a recipe before any of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness1.config import load_config
from harness1.errors import ConfigError, UsageError
from harness1.plain import meant
from harness1.recipe.recipe import Recipe


def check_commands(recipe: Recipe, work: Path) -> None:
    """Refuse a recipe with a verb, an option or a setting that does not exist, before its first stage begins.

    Raises:
        ConfigError: there is one; the message names the stage.
    """
    for name in recipe.stages:
        try:
            given = _parsed(recipe.words(name, work))
            config = given.get("config")
            if not str(config or "").startswith(str(work)):  # else it is the work of an earlier stage
                load_config(config, list(given.get("overrides") or ()))
        except UsageError as error:
            raise ConfigError(f"stage {name}: {error}") from error


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command, without running it; raise UsageError if there is no such command."""
    # Imported here, because the program imports this module.
    from harness1.cli.main import Misuse, app

    verbs: Any = app
    said: list[str] = []
    rest = list(words)
    while commands := getattr(verbs, "commands", {}):
        if not rest or rest[0] not in commands:
            verb, known = " ".join([*said, *rest[:1]]), [" ".join([*said, each]) for each in commands]
            raise UsageError(f"there is no command {verb!r}{meant(verb, known)}")
        said.append(rest[0])
        verbs = commands[rest.pop(0)]
    try:
        found: dict[str, Any] = verbs.make_context(" ".join(said), rest).params
    except Misuse as error:
        raise UsageError(f"harness1 {' '.join(said)}: {error.format_message()}") from error
    return found
