"""Comparison of runs on the same tasks: paired differences with their significance, what else differs, and their text
for a terminal, a pipe or a Markdown file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from harness1.config.settings import differences
from harness1.errors import UsageError
from harness1.eval.metrics import HEADLINE, cut
from harness1.eval.run import PerTask, Run
from harness1.eval.statistics import RESAMPLES, Interval, holm, paired_difference, probability, randomisation_test
from harness1.records import Faults, Record, Status
from harness1.reward.measures import delivery
from harness1.runs.folder import public_config


class Difference(Record):
    """A metric over the tasks for which both runs define it: both means, and the mean of the second minus the first.
    `p`: of a paired randomisation test. `p_holm`: p corrected for several runs compared with the first (Holm 1979)."""

    first: float
    second: float
    difference: Interval
    p: float
    tasks: int
    p_holm: float | None = None


def differences_of(
    first: PerTask, second: PerTask, names: Iterable[str], resamples: int, seed: int = 0
) -> dict[str, Difference]:
    """Return the difference in each named metric that some task has in both runs."""
    found: dict[str, Difference] = {}
    for name in names:
        both = sorted(task for task in first if name in first[task] and name in second.get(task, ()))
        if both:
            a, b = ({task: run[task][name] for task in both} for run in (first, second))
            found[name] = Difference(
                first=math.fsum(a.values()) / len(both),
                second=math.fsum(b.values()) / len(both),
                difference=paired_difference(b, a, resamples, seed),
                p=randomisation_test(b, a, resamples, seed),
                tasks=len(both),
            )
    return found


def correct_p_values(family: Sequence[Mapping[str, Difference]]) -> list[dict[str, Difference]]:
    """Correct the p-values of several runs compared with the same run, one family for each metric."""
    metrics = [dict(each) for each in family]
    for name in {name for found in metrics for name in found} if len(metrics) > 1 else ():
        values = {number: found[name].p for number, found in enumerate(metrics) if name in found}
        for number, p in holm(values).items():
            metrics[number][name] = msgspec.structs.replace(metrics[number][name], p_holm=p)
    return metrics


TIE_BREAKERS = ("trajectory_recall", "reward")  # metrics that order tasks with an equal change in the chosen metric
EQUAL = 1e-9  # two means over samples are equal if they differ by less than this


class Side(Record):
    """One of the runs. `broken`: episodes that the infrastructure broke, which count in its means as `faults` says."""

    folder: str
    policy: str
    tasks: int
    broken: int = 0
    faults: Faults = "exclude"


class Change(Record):
    """A task with a different result."""

    task_id: str
    query: str
    first: float
    second: float
    change: float


class Pairing(Record):
    """One run compared with the first. `tasks`: scored in both; `left_out`: other tasks of the first, and of the
    second, which `fell_out` counts by what they lack in a run, such as `first: not played` (see `FELL_OUT`). `wins`:
    tasks on which the second has the higher value of the chosen metric. `changed`: the largest change first."""

    second: Side
    tasks: int
    left_out: tuple[int, int]
    fell_out: dict[str, int]
    metrics: dict[str, Difference]
    cards: dict[str, tuple[Any, Any]]
    settings: dict[str, tuple[Any, Any]]
    wins: int
    losses: int
    ties: int
    changed: tuple[Change, ...]


class Comparison(Record):
    """Runs, each compared with the first of them. `metric`: by which tasks are won and lost."""

    metric: str
    equal_size: bool
    first: Side
    others: tuple[Pairing, ...]


def compare(runs: Sequence[Run], metric: str = "curated_recall", top: int = 10, equal_size: bool = False) -> Comparison:
    """Compare every run with the first, by `metric`. Raises UsageError: their tasks or metrics do not allow it."""
    if len(runs) < 2:
        raise UsageError("a comparison needs at least two runs")
    first = runs[0]
    both = (at_equal_size(first, other) if equal_size else (first, other) for other in runs[1:])
    pairs = [_pair_runs(*each, metric, top) for each in both]
    corrected = zip(pairs, correct_p_values([pair.metrics for pair in pairs]), strict=True)
    others = tuple(msgspec.structs.replace(pair, metrics=found) for pair, found in corrected)
    return Comparison(metric, equal_size, _describe(first)[0], others)


def at_equal_size(first: Run, second: Run) -> tuple[Run, Run]:
    """Return both runs with their sets cut, task by task, to the smallest that any sample of either delivered."""

    def find_least(run: Run, task_id: str) -> int:
        whole = [each for each in run.samples.get(task_id, ()) if each.status is not Status.INFRA_ERROR]
        return min((len(delivery(each)) for each in whole), default=0)

    def cut_run(run: Run) -> Run:
        found = run.episodes.items()
        episodes = {key: cut(each, common.get(key.task_id, len(each.curated))) for key, each in found}
        return replace(run, given=list(run.tasks.values()), played=episodes)

    both = first.per_task.keys() & second.per_task.keys()
    common = {task_id: min(find_least(first, task_id), find_least(second, task_id)) for task_id in both}
    return cut_run(first), cut_run(second)


def _pair_runs(first: Run, second: Run, metric: str, top: int) -> Pairing:
    # A dataset may have different locations, under the same name.
    names = [f"{Path(run.dataset).name}/{run.split}" for run in (first, second)]
    if names[0] != names[1]:
        where = f"{first.folder} was run on {names[0]} and {second.folder} on {names[1]}"
        raise UsageError(f"{where}: they have no tasks in common")
    for task_id in first.tasks.keys() & second.tasks.keys():
        if first.tasks[task_id] != second.tasks[task_id]:
            raise UsageError(f"task {task_id!r} of {first.folder} is a different task in {second.folder}")
    ours, theirs = first.per_task, second.per_task
    tasks = sorted(ours.keys() & theirs.keys())
    if not tasks:
        raise UsageError(f"{first.folder} and {second.folder} have no scored task in common")
    metrics = differences_of(ours, theirs, dict.fromkeys((*HEADLINE, metric)), RESAMPLES)
    if metric not in metrics:
        known = sorted({name for run in (ours, theirs) for row in run.values() for name in row})
        raise UsageError(f"no metric {metric!r} in both runs; choose from: {', '.join(known)}")
    # The changes of each task in the chosen metric, then in the tie breakers.
    moves = {
        task: [b[name] - a[name] if name in a and name in b else 0.0 for name in (metric, *TIE_BREAKERS)]
        for task, a, b in ((task, ours[task], theirs[task]) for task in tasks)
        if metric in a and metric in b
    }
    wins, losses = (sum(sign * move[0] > EQUAL for move in moves.values()) for sign in (1, -1))
    order = sorted(moves, key=lambda task: [-abs(round(part, 9)) for part in moves[task]])
    changed = tuple(
        Change(task, first.tasks[task].query, ours[task][metric], theirs[task][metric], moves[task][0])
        for task in [task for task in order if abs(moves[task][0]) > EQUAL][:top]
    )
    fell_out: Counter[str] = Counter()
    for name, run in (("first", first), ("second", second)):
        for task in (first.tasks.keys() | second.tasks.keys()) - run.per_task.keys():
            why = "not played" if task not in run.samples else "infrastructure"
            fell_out[f"{name}: {why if task in run.tasks else 'no such task'}"] += 1
    settings = differences(public_config(first.config), public_config(second.config))
    (_, card), (side, other) = map(_describe, (first, second))
    return Pairing(
        second=side,
        tasks=len(tasks),
        left_out=(len(first.tasks) - len(tasks), len(second.tasks) - len(tasks)),
        fell_out=dict(sorted(fell_out.items())),
        metrics=metrics,
        cards={name: (a, b) for name, a, b in differences(card, other)},
        settings={name: (a, b) for name, a, b in sorted(settings)},
        wins=wins,
        losses=losses,
        ties=len(moves) - wins - losses,
        changed=changed,
    )


def _describe(run: Run) -> tuple[Side, dict[str, Any]]:
    inputs, outputs = run.stage.inputs, run.stage.outputs
    broken = sum(episode.status is Status.INFRA_ERROR for episode in run.episodes.values())
    return Side(str(run.folder), run.policy, len(run.tasks), broken, run.faults), {
        "policy": run.policy,
        "policy hash": str(inputs.get("policy", ""))[:12],
        "format": outputs.get("format"),
        "index": f"{Path(run.index).name} {str(inputs.get('index', ''))[:12]}".strip(),
        "samples": inputs.get("samples"),
        "seed": inputs.get("seed"),
        "fused from": outputs.get("sources"),
    }


LONGEST = 12  # characters of the longest folder that names a column
FELL_OUT = {"infrastructure": "broken by the infrastructure", "not played": "not played", "no such task": "not"}
COUNTED = ("set_size", "turns", "prompt_tokens", "prefill_tokens")  # metrics that are amounts, shown with one decimal


@dataclass(frozen=True)
class Grid:
    """A table of plain text. `numbers`: columns that are right-aligned; `flexible`: the one that shrinks."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int]
    flexible: int | None = None


Block = str | Grid


def blocks(comparison: Comparison) -> Iterator[Block]:
    """Yield the comparison from top to bottom."""
    sides = [comparison.first, *(pair.second for pair in comparison.others)]
    names = [one_line(Path(side.folder).name) for side in sides]
    if len(set(names)) < len(names) or not all(0 < len(name) <= LONGEST for name in names):
        names = [f"run {number}" for number in range(1, len(names) + 1)]
    first, *others = names
    rows = []
    for name, side in zip(names, sides, strict=True):
        counted = " counted as 0" if side.broken and side.faults == "zero" else ""
        rows.append((name, side.folder, side.policy, str(side.tasks), f"{side.broken:,}{counted}"))
    yield Grid(("run", "folder", "policy", "tasks", "broken"), tuple(rows), frozenset({3, 4}), flexible=1)
    for name, pair in zip(others, comparison.others, strict=True):
        yield from _pair(comparison, pair, first, name)


def markdown(parts: Iterable[Block]) -> str:
    """Return the blocks as Markdown, with all special characters escaped."""

    def block(part: Block) -> str:
        if isinstance(part, str):
            return _cell(part)
        rule = ["---:" if column in part.numbers else "---" for column in range(len(part.columns))]
        rows = [part.columns, tuple(rule), *(tuple(map(_cell, row)) for row in part.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    return "\n\n".join(map(block, parts)) + "\n"


def one_line(text: str) -> str:
    """Convert text from outside to one printable line."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _pair(comparison: Comparison, pair: Pairing, first: str, name: str) -> Iterator[Block]:
    left = " and ".join(f"{count} of {side}" for count, side in zip(pair.left_out, (first, name), strict=True))
    reasons = []
    for key, count in pair.fell_out.items():
        side, _, reason = key.partition(": ")
        reasons.append(f"{count} {FELL_OUT[reason]} in {first if side == 'first' else name}")
    lost = f" (left out: {left}; {', '.join(reasons)})" if any(pair.left_out) else ""
    cut = "; the sets of both are cut to the smaller one, task by task" if comparison.equal_size else ""
    yield f"{name} - {first}, {pair.tasks} common tasks{lost}{cut}"
    corrected = any(row.p_holm is not None for row in pair.metrics.values())
    heads = ("metric", first, name, "diff", "95 % interval", "p (Holm)" if corrected else "p")
    yield Grid(heads, tuple(_row(*each) for each in pair.metrics.items()), frozenset(range(1, 6)))
    counts = f"{pair.wins} higher, {pair.losses} lower, {pair.ties} equal"
    yield f"{comparison.metric} of {name}, task by task: {counts}."
    if other := [(key, _show(a), _show(b)) for key, (a, b) in {**pair.cards, **pair.settings}.items()]:
        yield Grid(("what differs", first, name), tuple(other), frozenset(), flexible=2)
    else:
        yield "Their cards and configurations are equal."
    if pair.changed or not pair.wins + pair.losses:
        yield f"Tasks that changed most in {comparison.metric}:"
        changed = []
        for each in pair.changed:
            values = f"{each.first:.3f}", f"{each.second:.3f}", f"{each.change:+.3f}"
            changed.append((one_line(each.task_id), *values, one_line(each.query)))
        columns = ("task", first, name, "change", "query")
        yield Grid(columns, tuple(changed), frozenset({1, 2, 3}), flexible=4) if changed else "None changed."


def _row(metric: str, row: Difference) -> tuple[str, ...]:
    places = 3 if metric not in COUNTED else 1 if max(abs(row.first), abs(row.second)) < 1000 else 0
    first, second = (f"{value:,.{places}f}" for value in (row.first, row.second))
    mean, low, high = (f"{getattr(row.difference, name):+,.{places}f}" for name in ("mean", "low", "high"))
    return metric, first, second, mean, f"{low} to {high}", probability(row.p if row.p_holm is None else row.p_holm)


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_show, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else one_line(str(value))


def _cell(text: str) -> str:
    return "".join(f"&#{ord(sign)};" if sign in "\\`*[]<>&|" else sign for sign in text)
