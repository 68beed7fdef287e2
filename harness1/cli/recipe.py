"""harness1 recipe and tune: the chain from documents to an evaluated policy, and trials of its settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from harness1.cli.options import Json, RecipeChanges, RecipeInputs, RecipeName
from harness1.cli.printing import print_json, print_result, program, put, say
from harness1.cli.progress import print_table
from harness1.config import load_config
from harness1.errors import ConfigError, UsageError
from harness1.plain import counted, meant
from harness1.recipe import run as running
from harness1.recipe import tuning
from harness1.recipe.recipe import Recipe, load_recipe, shipped_recipes
from harness1.training.log import LOG, read_log

NEGATIVE = 1


def run(
    recipe: RecipeName,
    out: Annotated[Path, Option(help="The folder that gets everything.", metavar="WORK")],
    start_from: Annotated[str, Option("--from", help="Do this stage and all that use it again.", metavar="STAGE")] = "",
    until: Annotated[str, Option(help="Stop after this stage.", metavar="STAGE")] = "",
    changes: RecipeChanges = None,
    inputs: RecipeInputs = None,
    as_json: Json = False,
) -> None:
    """Run the stages of a recipe with gates between them; the same command resumes it after any end.

    Exit code 1 if a gate fails. With --json, the output of commands goes to WORK/logs.

    Example: harness1 recipe run tiny --out work"""
    asked = load_recipe(recipe, changes or (), inputs or ())
    check_commands(asked, out)
    names = asked.until(until)
    expected = sum(asked.stages[name].takes for name in names)
    say(f"{counted(len(names), 'stage')}{f', {_minutes(expected)} on two cores' * bool(expected)}")
    say(f"to watch: {program()} view {out} --serve; what is to come: {program()} recipe status {out}")
    if (begun := running.read_recipe_state(out)) is not None and begun.hashing != running.HASHING:
        say(f"{out} was begun by another version: what it hashed otherwise runs again, and finds its work done")

    def tell(event: running.Event, stage: str, record: running.StageRecord) -> None:
        where, says = f"stage {names.index(stage) + 1} of {len(names)}, {stage}", asked.stages[stage].says
        if event == "begins":
            return say(f"{where}{': ' if says else ''}{says}")
        if event == "had passed":
            return say(f"{where}: passed before")
        for finding in record.findings:
            say(f"{'passed' if finding.passed else 'FAILED'}, {running.put_in_words(finding)}")
        if record.status == "passed" and stage != names[-1] and (left := _time_left(running.read_recipe_state(out))):
            say(left)
        return None

    work = running.RecipeRun(asked, out, partial(running.run_verb, quiet=as_json), tell, parse_command)
    try:
        journal = work.run(start_from, until)
    except running.StageFailed as error:
        say(str(error))
        if as_json:
            print_json(running.read_recipe_state(out))
            say(f"its output: {out / running.LOGS / error.stage}.log")
        raise typer.Exit(error.record.exit or NEGATIVE) from error
    print_result(journal, as_json, _print_recipe, out)


def status(
    work: Annotated[Path, Argument(help="The folder of a recipe.", metavar="WORK")], as_json: Json = False
) -> None:
    """Show the stages of a recipe's folder: what is done, what the gates found, what failed, and what is to come.

    Example: harness1 recipe status work"""
    journal = running.read_recipe_state(work)
    if journal is None:
        raise UsageError(f"{work} holds no recipe: it has no {running.JOURNAL}")
    now = {"left": journal.time_left(time.time()), "at_work": running.is_at_work(work)}
    print_result(msgspec.to_builtins(journal) | now, as_json, lambda _: _print_recipe(journal, work))


def list_recipes(as_json: Json = False) -> None:
    """List the recipes that come with the package, with their stages and what they ask for.

    Example: harness1 recipe list"""
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


def _print_recipe(journal: running.RecipeState, work: Path) -> None:
    at_work = running.is_at_work(work)
    put(f"{work}: {journal.title}")
    rows = []
    for name, record in journal.stages.items():
        passed = sum(each.passed for each in record.findings)
        gates = f"{passed} of {len(record.findings)}" if record.findings else ""
        status = record.status_now(at_work)
        seconds = record.seconds + (time.time() - record.began if status == "running" else 0.0)
        made = record.artifact[:12]
        if not made and (work / name / LOG).is_file() and (log := read_log(work / name)):
            made = f"step {log[-1]['step']}"
        rows.append((name, status, f"{seconds:,.1f}", gates, made))
    for name, seconds in journal.times().items():
        if name not in journal.stages:
            rows.append((name, "to come", f"about {seconds:,.0f}" if seconds else "", "", ""))
    print_table(("stage", "status", "seconds", "gates", "artifact"), rows)
    for name, record in journal.stages.items():
        for finding in record.findings:
            if not finding.passed:
                put(f"{name}: {running.put_in_words(finding)}")
    put(f"{counted(len(journal.stages), 'stage')}, {sum(each.seconds for each in journal.stages.values()):,.0f} s")
    stopped = [name for name, record in journal.stages.items() if record.status_now(at_work) == "stopped"]
    if stopped:
        put(f"{stopped[0]} was stopped: the same `recipe run` goes on from there")
    elif at_work and (left := _time_left(journal)):
        put(left)


def _time_left(journal: running.RecipeState | None) -> str:
    """Return how much time is left in words, or an empty string where nothing is known or nothing is left."""
    left = journal.time_left(time.time()) if journal is not None else None
    return f"about {_minutes(left)} left" if left else ""


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def check_commands(recipe: Recipe, work: Path) -> None:
    """Raise ConfigError if a stage of a recipe names a verb, an option or a setting that does not exist."""
    for name in recipe.stages:
        try:
            words = recipe.words(name, work)
            if "\0" in "".join(words):
                raise UsageError("a command cannot hold the character NUL")
            _, given = parse_command(words)
            config = given.get("--config")
            if not str(config or "").startswith(str(work)):  # else it is the work of an earlier stage
                load_config(config, list(given.get("--set") or ()))
        except UsageError as error:
            raise ConfigError(f"stage {name}: {error}") from error


def parse_command(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the verb of a command and the values of its options and arguments by their names, such as `--policy` and
    `runs`, without running it; raise UsageError if there is no such command. A stage that asks for help does nothing.
    """
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
        context = verbs.make_context(" ".join(said), rest, help_option_names=[])
    except Misuse as error:
        raise UsageError(f"harness1 {' '.join(said)}: {error.format_message()}") from error
    return context.info_name, {each.opts[0]: context.params[each.name] for each in context.command.params}


def tune(
    recipe: RecipeName,
    out: Annotated[Path, Option(help="The folder that gets the trials.", metavar="TRIALS")],
    trials: Annotated[int, Option(help="Trials to run in all.", min=1)] = 20,
    parallel: Annotated[int, Option(help="Trials at the same time.", min=1)] = 1,
    seed: Annotated[int, Option(help="Seed of the sampler.")] = 0,
    experience: Annotated[
        Path | None, Option(help=f"What tunings learned; default {tuning.EXPERIENCE}.", metavar="FOLDER")
    ] = None,
    forget: Annotated[bool, Option("--no-experience", help="Read and keep no experience.")] = False,
    changes: RecipeChanges = None,
    inputs: RecipeInputs = None,
    as_json: Json = False,
) -> None:
    """Search settings of a recipe in parallel trials; the same command resumes it after any end.

    What no setting reaches is done once. A trial stops at a gate, or where it looks worse than the median. Settings
    that worked on the same documents, reward and size of model come first; those that failed are not tried again.

    Example: harness1 tune tiny --trials 20 --parallel 2 --out trials"""

    def say_result(result: tuning.TrialResult) -> None:
        value = f"{result.value:.4g}" if result.value is not None else result.stopped
        say(f"trial {result.number} ended after {result.seconds:,.0f} s: {value}")

    def tell(trial: int | None) -> running.Watch:
        name = "shared" if trial is None else f"trial {trial}"
        return lambda event, stage, record: say(f"{name}: {stage}") if event == "begins" else None

    asked = load_recipe(recipe, changes or (), inputs or ())
    check_commands(asked, out)
    do, kept = partial(running.run_verb, quiet=True), None if forget else (experience or tuning.EXPERIENCE).expanduser()
    tuning.Tuning(asked, out.resolve(), do, tell, parse_command, seed, kept, say_result).run(trials, parallel)
    show(out, as_json)


def show(
    folder: Annotated[Path, Argument(help="The folder of a tuning.", metavar="TRIALS")], as_json: Json = False
) -> None:
    """Show the trials of a tuning as a table, and the best settings.

    Example: harness1 tune show trials"""
    card = tuning.read_tuning(folder)
    if card is None:
        raise UsageError(f"{folder} holds no trials: it has no {tuning.TUNING}")
    results = sorted(tuning.read_results(folder / tuning.RESULTS, card.search), key=lambda each: each.number)
    best = tuning.best_of(results, maximize=card.maximize)
    if as_json:
        print_json({"tuning": card, "best": best, "trials": results})
        return
    put(f"{folder}: {card.title} Compared by {card.metric}, {'more' if card.maximize else 'less'} is better.")
    rows = []
    for each in results:
        value = "" if each.value is None else f"{each.value:.4g}"
        tried = (_show(each.settings.get(name)) for name in card.search)
        rows.append((str(each.number), value, *tried, f"{each.seconds:,.0f}", each.stopped))
    print_table(("trial", card.metric, *card.search, "seconds", "stopped"), rows)
    if best is not None:
        words = " ".join(f"--set {name}={_show(value)}" for name, value in best.settings.items())
        put(f"Best of {counted(len(results), 'trial')}: {best.value:.4g} in trial {best.number}: {words}")


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
