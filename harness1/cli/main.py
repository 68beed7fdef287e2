"""The entry point: verbs, exit codes, and errors in one line.

Exit codes: 0 done, 1 the result is negative (a replay that differs), 2 wrong use, 3 infrastructure fault, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from harness1.errors import InfrastructureFault, UsageError


class Verb(TyperCommand):
    """A verb that is imported when it is run or asked for its help; until then it is one line in the list of verbs."""

    def __init__(self, name: str, line: str, target: str) -> None:
        super().__init__(name, help=line, rich_markup_mode=None)
        self.target = target

    def load(self) -> Any:
        """Import the verb's function, `module:function` below `harness1.cli`, and return its command."""
        module, _, function = self.target.partition(":")
        verb = typer.Typer(add_completion=False, rich_markup_mode=None)
        verb.command(self.name)(getattr(import_module(f"harness1.cli.{module}"), function))
        return get_command(verb)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse the arguments as the imported verb does."""
        return self.load().make_context(*args, **settings)


class Verbs(TyperGroup):
    """A group of verbs, from a table like `verbs.toml`. Typer's own group would end an interrupted verb silently."""

    def __init__(self, name: str, line: str, table: Mapping[str, Any]) -> None:
        verbs = [
            Verbs(verb, entry["help"], entry["verbs"]) if "verbs" in entry else Verb(verb, entry["help"], entry["run"])
            for verb, entry in table.items()
        ]
        super().__init__(name=name, help=line, commands=verbs, no_args_is_help=True, rich_markup_mode=None)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb. Report an interrupt with the notes that the verb added to it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            sys.exit(_fail("; ".join(["interrupted", *getattr(interrupt, "__notes__", ())]), 130))


app = Verbs(
    "harness1",
    "Search episodes over your own corpora: index, search, evaluate, replay, serve, train.",
    tomllib.loads(Path(__file__).with_name("verbs.toml").read_text()),
)


def run() -> None:
    """Run the command line of this process."""
    try:
        app()
    except UsageError as error:
        sys.exit(_fail(str(error), 2))
    except InfrastructureFault as error:
        sys.exit(_fail(str(error), 3))
    except BrokenPipeError:
        # The reader closed the pipe, because it has all that it wanted.
        sys.stderr.close()
        sys.exit(0)


def _fail(message: str, code: int) -> int:
    print(f"harness1: {message}", file=sys.stderr)
    return code
