"""What trials of a recipe share and what each does alone, and the lines that a trial leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from harness1.errors import UsageError
from harness1.recipe.recipe import Objective, Recipe, Space, Value, put_setting, recipe_of, uses
from harness1.records import Record

NEAR = 0.05
"""Share of a range within which two values of a setting count as the same."""

Settings = dict[str, Value]


class TrialResult(Record, kw_only=True):
    """What came out of one trial: all that later tunings learn from it."""

    number: int
    settings: Settings
    value: float | None = None
    """The objective; None for a trial that was stopped."""
    looks: dict[str, float] = {}
    """What was measured on the way, by stage."""
    stopped: str = ""
    """Why it did not end; empty if it did."""
    failed: bool = False
    """A gate or a command failed, so that the settings are not to be tried again."""
    seconds: float = 0.0
    """The time that its own stages took."""


def objective_of(recipe: Recipe) -> Objective:
    """Return what trials of a recipe are compared by; raise UsageError if it does not say, or varies nothing."""
    if recipe.objective is None or not recipe.search:
        raise UsageError("the recipe has no [search] or no [objective]: nothing to tune")
    return recipe.objective


def varied_stages(recipe: Recipe) -> frozenset[str]:
    """Return the stages that a searched setting reaches, directly or through a stage before."""
    own = {key.partition(".")[0] for key in recipe.search if key not in recipe.values}
    values = {key for key in recipe.search if key in recipe.values}
    own |= {name for name, stage in recipe.stages.items() if values & set(uses(stage))}
    return frozenset(name for name in recipe.stages if name in own or own & recipe.upstream(name))


def needed_stages(recipe: Recipe) -> tuple[str, ...]:
    """Return the stages that the objective and its looks need, in order."""
    objective = objective_of(recipe)
    ends = [objective.stage, *objective.looks]
    wanted = frozenset(ends).union(*(recipe.upstream(name) for name in ends))
    return tuple(name for name in recipe.stages if name in wanted)


def shared_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the stages that all trials have in common."""
    varied = varied_stages(recipe)
    kept = {name: recipe.stages[name] for name in needed_stages(recipe) if name not in varied}
    return msgspec.structs.replace(recipe, stages=kept, search={}, objective=None)


def trial_recipe(recipe: Recipe, settings: Mapping[str, Value], shared: Path) -> Recipe:
    """Return the recipe of one trial: the stages that its settings reach, over the folders of the shared ones."""
    varied = varied_stages(recipe)
    ours = [name for name in needed_stages(recipe) if name in varied]
    tree = msgspec.to_builtins(recipe)
    for key, value in settings.items():
        put_setting(tree, key, value)
    tree["inputs"] |= {name: str(shared / name) for name in shared_recipe(recipe).stages}
    tree["stages"] = {name: tree["stages"][name] for name in ours}
    tree |= {"search": {}, "objective": None}
    return recipe_of(tree, recipe.title)


def is_near(one: Mapping[str, Value], other: Mapping[str, Value], search: Mapping[str, Space]) -> bool:
    """Return whether two trials have nearly the same settings: equal choices, and numbers that differ by less than
    `NEAR` of their range, on the scale on which they are drawn."""
    return all(
        name in one and name in other and _close(one[name], other[name], space) for name, space in search.items()
    )


def within(settings: Mapping[str, Value], search: Mapping[str, Space]) -> bool:
    """Return whether settings give every searched one a value that trials may draw."""
    return settings.keys() == search.keys() and all(_allowed(settings[name], space) for name, space in search.items())


def best_of(results: Sequence[TrialResult], *, maximize: bool) -> TrialResult | None:
    """Return the result with the best value, the first of equal ones; None if no trial ended."""
    ended = [each for each in results if each.value is not None and math.isfinite(each.value)]
    sign = -1.0 if maximize else 1.0
    return min(ended, key=lambda each: sign * (each.value or 0.0), default=None)


def _close(one: Value, other: Value, space: Space) -> bool:
    if space.choices or isinstance(one, str) or isinstance(other, str) or space.low is None or space.high is None:
        return one == other
    low, high, a, b = (math.log(each) if space.log else float(each) for each in (space.low, space.high, one, other))
    return abs(a - b) < NEAR * (high - low)


def _allowed(value: Value, space: Space) -> bool:
    if space.choices:
        return value in space.choices
    return (
        not isinstance(value, str)
        and space.low is not None
        and space.high is not None
        and space.low <= value <= space.high
    )
