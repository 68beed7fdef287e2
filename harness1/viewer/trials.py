"""The page of a tuning: how the objective went from trial to trial, and how each setting bears on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness1.recipe.recipe import Space, Value
from harness1.recipe.tuning import TrialResult, TuningCard, best_of
from harness1.runs.files import write_atomically, writing
from harness1.viewer.html import render

PAGE = "tuning.html"


class Dot(NamedTuple):
    """A trial in a plot; places are shares of the plot's width and height, from below."""

    x: float
    y: float
    says: str
    best: bool
    stopped: bool


class Plot(NamedTuple):
    """The trials over their numbers, or over the values of one setting."""

    name: str
    low: str
    high: str
    dots: list[Dot]


def write_page(folder: Path, card: TuningCard, results: Sequence[TrialResult]) -> Path:
    """Write the page of a tuning into its folder, and return its path.

    Raises:
        UsageError: the folder cannot be written.
    """
    best = best_of(results, maximize=card.maximize)
    ended = [each.value for each in results if each.value is not None and math.isfinite(each.value)]
    low, high = (min(ended), max(ended)) if ended else (0.0, 1.0)
    plots = [_by_number(results, best, low, high)]
    plots += [_by_setting(name, space, results, best, low, high) for name, space in card.search.items()]
    page = render(
        "trials.html",
        title=card.title,
        styles=("report.css",),
        card=card,
        results=results,
        best=best,
        plots=plots,
        low=low,
        high=high,
    )
    with writing(folder):
        write_atomically(folder / PAGE, "".join(page).encode())
    return folder / PAGE


def _by_number(results: Sequence[TrialResult], best: TrialResult | None, low: float, high: float) -> Plot:
    last = max([each.number for each in results], default=0)
    dots = [_dot(each, _share(each.number, 0, last), best, low, high) for each in results]
    return Plot("trial", "0", str(last), dots)


def _by_setting(
    name: str, space: Space, results: Iterable[TrialResult], best: TrialResult | None, low: float, high: float
) -> Plot:
    known = [each for each in results if name in each.settings]
    dots = [_dot(each, _place(each.settings[name], space), best, low, high) for each in known]
    first, last = (space.choices[0], space.choices[-1]) if space.choices else (space.low, space.high)
    return Plot(name + (", logarithmic" if space.log else ""), _text(first), _text(last), dots)


def _dot(result: TrialResult, x: float, best: TrialResult | None, low: float, high: float) -> Dot:
    stopped = result.value is None
    y = 0.0 if result.value is None else _share(result.value, low, high)
    outcome = result.stopped if result.value is None else f"{result.value:.4g}"
    settings = ", ".join(f"{name} {_text(value)}" for name, value in result.settings.items())
    return Dot(x, y, f"trial {result.number}: {outcome} ({settings})", result == best, stopped)


def _place(value: Value, space: Space) -> float:
    if space.choices:
        return _share(space.choices.index(value) if value in space.choices else 0, 0, len(space.choices) - 1)
    assert space.low is not None
    assert space.high is not None
    assert not isinstance(value, str)
    scale = math.log if space.log else float
    return _share(scale(value), scale(space.low), scale(space.high))


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
