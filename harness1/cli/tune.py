"""harness1 tune: search settings of a recipe in parallel trials, and keep what was learned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import to_builtins
from typer import Argument, Option

from harness1.cli.command_check import check_commands
from harness1.cli.options import Json, RecipeChanges, RecipeInputs, RecipeName
from harness1.cli.printing import print_result, put, say
from harness1.cli.results import headed
from harness1.cli.terminal import Terminal
from harness1.errors import UsageError
from harness1.plain import counted
from harness1.recipe.recipe import load_recipe
from harness1.recipe.run import StageRecord, on_cluster, run_verb
from harness1.recipe.tuning import (
    EXPERIENCE,
    TUNING,
    Experience,
    TrialResult,
    Tuning,
    TuningCard,
    best_of,
    read_results,
    read_tuning,
    tuning_subject,
)
from harness1.viewer.work import PAGE, write_page


class Told:
    """Tells the user on standard error how a trial, or what all share, goes on."""

    def __init__(self, trial: int | None) -> None:
        self.name = "shared" if trial is None else f"trial {trial}"

    def begins(self, stage: str, says: str) -> None:
        """Say which stage begins."""
        say(f"{self.name}: {stage}")

    def skipped(self, stage: str, record: StageRecord) -> None:
        """Say nothing: the stage had passed before."""

    def ended(self, stage: str, record: StageRecord) -> None:
        """Say nothing: what stops a trial is said at its end."""


def tune(
    recipe: RecipeName,
    out: Annotated[Path, Option(help="The folder that gets the trials.", metavar="TRIALS")],
    trials: Annotated[int, Option(help="Trials to run in all.", min=1)] = 20,
    parallel: Annotated[int, Option(help="Trials at the same time.", min=1)] = 1,
    seed: Annotated[int, Option(help="Seed of the sampler.")] = 0,
    experience: Annotated[
        Path | None, Option(help=f"Folder of what tunings learned; default {EXPERIENCE}.", metavar="FOLDER")
    ] = None,
    forget: Annotated[bool, Option("--no-experience", help="Read and keep no experience.")] = False,
    ray: Annotated[
        str, Option(help="Run the commands on a Ray cluster with a shared file system.", metavar="ADDRESS")
    ] = "",
    changes: RecipeChanges = None,
    inputs: RecipeInputs = None,
    as_json: Json = False,
) -> None:
    """Search settings of a recipe in parallel trials; the same command resumes it after any end.

    What no setting reaches is done once. A trial stops at a gate, or where it looks worse than the median. Settings
    that worked on the same documents, reward and size of model come first; those that failed are not tried again.

    Example: harness1 tune tiny --trials 20 --parallel 2 --out trials
    """
    asked = load_recipe(recipe, changes or (), inputs or ())
    check_commands(asked, out)
    folder = (experience or EXPERIENCE).expanduser()
    work = Tuning(
        asked,
        out.resolve(),
        on_cluster(ray) if ray else partial(run_verb, quiet=True),
        Told,
        seed,
        None if forget else lambda shared: Experience(folder, tuning_subject(asked, shared)),
        _say_result,
    )
    work.run(trials, parallel)
    show(out, as_json)


def show(
    folder: Annotated[Path, Argument(help="The folder of a tuning.", metavar="TRIALS")], as_json: Json = False
) -> None:
    """Show the trials of a tuning as a table, and write a page with their plots.

    Example: harness1 tune show trials
    """
    card = read_tuning(folder)
    if card is None:
        raise UsageError(f"{folder} holds no trials: it has no {TUNING}")
    results = sorted(read_results(folder), key=lambda each: each.number)
    page = write_page(folder, card, results)
    best = best_of(results, maximize=card.maximize)
    found = {"tuning": to_builtins(card), "best": to_builtins(best), "trials": to_builtins(results), "page": str(page)}
    print_result(found, as_json, _in_words, card, results, best, folder)


def _in_words(
    found: dict[str, Any], card: TuningCard, results: list[TrialResult], best: TrialResult | None, folder: Path
) -> None:
    put(f"{folder}: {card.title} Compared by {card.metric}, {'more' if card.maximize else 'less'} is better.")
    table = headed("trial", card.metric, *card.search, "seconds", "stopped")
    for each in results:
        value = "" if each.value is None else f"{each.value:.4g}"
        settings = (_shown(each.settings.get(name)) for name in card.search)
        table.add_row(str(each.number), value, *settings, f"{each.seconds:,.0f}", each.stopped)
    Terminal().print(table)
    if best is not None and best.value is not None:
        words = " ".join(f"--set {name}={_shown(value)}" for name, value in best.settings.items())
        put(f"Best of {counted(len(results), 'trial')}: {best.value:.4g} in trial {best.number}: {words}")
    put(f"Plots: {folder / PAGE}")


def _say_result(result: TrialResult) -> None:
    value = f"{result.value:.4g}" if result.value is not None else result.stopped
    say(f"trial {result.number} ended after {result.seconds:,.0f} s: {value}")


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
