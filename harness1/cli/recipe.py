"""harness1 recipe: run the chain from documents to an evaluated policy, with gates between its stages."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from harness1.cli.command_check import check_commands
from harness1.cli.options import Json, RecipeChanges, RecipeInputs, RecipeName
from harness1.cli.printing import print_json, print_result, program, put, say
from harness1.cli.results import headed
from harness1.cli.terminal import Terminal
from harness1.errors import UsageError
from harness1.plain import counted
from harness1.recipe.recipe import load_recipe, shipped_recipes
from harness1.recipe.run import (
    JOURNAL,
    LOGS,
    RecipeRun,
    RecipeState,
    StageFailed,
    StageRecord,
    is_at_work,
    put_in_words,
    read_recipe_state,
    run_verb,
)
from harness1.training.log import LOG, read_log

NEGATIVE = 1


class Told:
    """Tells the user on standard error how a recipe goes on.

    Args:
        stages: how many there are.
        work: the folder of the recipe.
    """

    def __init__(self, stages: int, work: Path) -> None:
        self.stages, self.work, self.at = stages, work, 0

    def begins(self, stage: str, says: str) -> None:
        """Say which stage begins, and what it does."""
        self.at += 1
        say(f"stage {self.at} of {self.stages}, {stage}{': ' if says else ''}{says}")

    def skipped(self, stage: str, record: StageRecord) -> None:
        """Say that a stage had passed before."""
        self.at += 1
        say(f"stage {self.at} of {self.stages}, {stage}: passed before")

    def ended(self, stage: str, record: StageRecord) -> None:
        """Say what the gates of a stage found."""
        for finding in record.findings:
            say(f"{'passed' if finding.passed else 'FAILED'}, {put_in_words(finding)}")
        if record.status == "passed" and self.at < self.stages and (left := _left(read_recipe_state(self.work))):
            say(left)


def run(
    recipe: RecipeName,
    out: Annotated[Path, Option(help="The folder that gets everything.", metavar="WORK")],
    start_from: Annotated[
        str, Option("--from", help="Do this stage again, and all that use its result.", metavar="STAGE")
    ] = "",
    until: Annotated[str, Option(help="Stop after this stage.", metavar="STAGE")] = "",
    changes: RecipeChanges = None,
    inputs: RecipeInputs = None,
    as_json: Json = False,
) -> None:
    """Run the stages of a recipe with gates between them; the same command resumes it after any end.

    Exit code 1 if a gate fails. With --json, the output of commands goes to WORK/logs.

    Example: harness1 recipe run tiny --out work
    """
    asked = load_recipe(recipe, changes or (), inputs or ())
    check_commands(asked, out)
    names = asked.until(until)
    expected = sum(asked.stages[name].takes for name in names)
    say(f"{counted(len(names), 'stage')}{f', {_minutes(expected)} on two cores' * bool(expected)}")
    say(f"to watch: {program()} view {out} --serve; what is to come: {program()} recipe status {out}")
    work = RecipeRun(asked, out, partial(run_verb, quiet=as_json), Told(len(names), out))
    try:
        journal = work.run(start_from, until)
    except StageFailed as error:
        say(str(error))
        if as_json:
            print_json(read_recipe_state(out))
            say(f"its output: {out / LOGS / error.stage}.log")
        raise typer.Exit(error.record.exit or NEGATIVE) from error
    print_result(journal, as_json, _in_words, out)


def status(
    work: Annotated[Path, Argument(help="The folder of a recipe.", metavar="WORK")], as_json: Json = False
) -> None:
    """Show the stages of a recipe's folder: what is done, what the gates found, what failed, and what is to come.

    Example: harness1 recipe status work
    """
    journal = read_recipe_state(work)
    if journal is None:
        raise UsageError(f"{work} holds no recipe: it has no {JOURNAL}")
    if as_json:
        print_json(msgspec.to_builtins(journal) | {"left": journal.left(time.time()), "at_work": is_at_work(work)})
    else:
        _in_words(journal, work)


def list_recipes(as_json: Json = False) -> None:
    """List the recipes that come with the package, with their stages and what they ask for.

    Example: harness1 recipe list
    """
    every = {name: load_recipe(str(file), inputs=(), complete=False) for name, file in shipped_recipes().items()}
    if as_json:
        print_json(every)
        return
    for name, each in every.items():
        put(f"{name}: {each.title}")
        put(f"    stages  {' -> '.join(each.stages)}")
        needed = [f"--input {key}=PLACE" for key, place in each.inputs.items() if not place]
        if needed:
            put(f"    needs   {' '.join(needed)}")


def _in_words(journal: RecipeState, work: Path) -> None:
    at_work = is_at_work(work)
    put(f"{work}: {journal.title}")
    table = headed("stage", "status", "seconds", "gates", "artifact")
    for name, record in journal.stages.items():
        passed = sum(each.passed for each in record.findings)
        gates = f"{passed} of {len(record.findings)}" if record.findings else ""
        status = record.status_now(at_work)
        seconds = record.seconds + (time.time() - record.began if status == "running" else 0.0)
        table.add_row(name, status, f"{seconds:,.1f}", gates, record.artifact[:12] or _step(work / name))
    for name, seconds in journal.expected().items():
        if name not in journal.stages:
            table.add_row(name, "to come", f"about {seconds:,.0f}" if seconds else "", "", "")
    Terminal().print(table)
    for name, record in journal.stages.items():
        for finding in record.findings:
            if not finding.passed:
                put(f"{name}: {put_in_words(finding)}")
    put(f"{counted(len(journal.stages), 'stage')}, {sum(each.seconds for each in journal.stages.values()):,.0f} s")
    stopped = [name for name, record in journal.stages.items() if record.status_now(at_work) == "stopped"]
    if stopped:
        put(f"{stopped[0]} was stopped: the same `recipe run` goes on from there")
    elif at_work and (left := _left(journal)):
        put(left)


def _left(journal: RecipeState | None) -> str:
    """Return how much time is left in words, or an empty string where nothing is known or nothing is left."""
    left = journal.left(time.time()) if journal is not None else None
    return f"about {_minutes(left)} left" if left else ""


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _step(folder: Path) -> str:
    """Return the last step that a training under way has logged."""
    lines = read_log(folder) if (folder / LOG).is_file() else []
    return f"step {lines[-1]['step']}" if lines else ""
