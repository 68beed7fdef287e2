"""Runs beside each other on the same tasks: paired differences with their significance, and what else is different."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from harness1.errors import UsageError
from harness1.eval.metrics import HEADLINE
from harness1.eval.run_view import RunView, refuse_other_dataset
from harness1.eval.statistics import Interval, holm, paired_difference, randomisation_test
from harness1.eval.summary import cut
from harness1.records import Record, Status
from harness1.reward.outcome import delivered
from harness1.runs.folder import shown_config
from harness1.settings import differences

TIE_BREAKERS = ("trajectory_recall", "reward")
"""By what tasks that changed alike in the chosen metric are ordered."""

EQUAL = 1e-9
"""Two means over samples that are nearer than this are equal."""


class Side(Record):
    """One of the runs."""

    folder: str
    policy: str
    tasks: int
    """All that it was to do, scored or not."""


class Difference(Record):
    """A metric over the common tasks: the means of both, and of the second minus the first."""

    first: float
    second: float
    difference: Interval
    p: float
    """Of a paired randomisation test, two-sided."""
    tasks: int
    """Where both runs define it."""
    p_holm: float | None = None
    """Where several runs are compared with the first: corrected for their number (Holm 1979)."""


class Change(Record):
    """A task that came out differently."""

    task_id: str
    query: str
    first: float
    second: float
    change: float
    address: str
    """Of its first episodes, side by side, in a viewer file of the runs."""


class Pairing(Record):
    """One run beside the first."""

    second: Side
    tasks: int
    """Common ones, scored in both."""
    left_out: tuple[int, int]
    """Tasks of the first, and of the second, that are not among them."""
    metrics: dict[str, Difference]
    cards: dict[str, tuple[Any, Any]]
    settings: dict[str, tuple[Any, Any]]
    wins: int
    """Tasks on which the second has the higher value of the chosen metric."""
    losses: int
    ties: int
    changed: tuple[Change, ...]
    """Those whose value of the chosen metric changed most, first."""


class Comparison(Record):
    """Runs, each beside the first of them."""

    metric: str
    """By which tasks are won and lost."""
    equal_size: bool
    first: Side
    others: tuple[Pairing, ...]


def compare(
    runs: Sequence[RunView], metric: str = "curated_recall", top: int = 10, equal_size: bool = False
) -> Comparison:
    """Compare every further run with the first.

    Args:
        metric: by which tasks are won, lost and said to have changed.
        top: how many changed tasks are kept.
        equal_size: compare ranked sets of one size (see `at_equal_size`).

    Raises:
        UsageError: there are fewer than two runs, they are of different tasks, or one has no such metric.
    """
    if len(runs) < 2:
        raise UsageError("a comparison takes two runs or more")
    first, *others = runs
    pairs = [
        _paired(*(at_equal_size(first, other) if equal_size else (first, other)), metric, top, number)
        for number, other in enumerate(others, start=1)
    ]
    return Comparison(metric, equal_size, _side(first), tuple(_corrected(pairs)))


def at_equal_size(first: RunView, second: RunView) -> tuple[RunView, RunView]:
    """Both runs with their ranked sets cut, task by task, to the smallest that any sample of either delivered. Tasks
    that are not scored in both stay as they are."""
    sizes, others = _sizes(first), _sizes(second)
    common = {task_id: min(sizes[task_id], others[task_id]) for task_id in sizes.keys() & others.keys()}
    return _cut(first, common), _cut(second, common)


def view_command(folders: Sequence[str], file: str) -> list[str]:
    """The command that makes the viewer file to which the addresses of a comparison lead."""
    return ["harness1", "view", *folders, "--out", file]


def _sizes(run: RunView) -> dict[str, int]:
    """For each scored task the size of the smallest set; a task without an episode delivered nothing."""
    found: dict[str, list[int]] = {task_id: [] for task_id in run.per_task}
    for key, episode in run.episodes.items():
        if episode.status is not Status.INFRA_ERROR:
            found[key.task_id].append(len(delivered(episode)))
    return {task_id: min(sizes, default=0) for task_id, sizes in found.items()}


def _cut(run: RunView, sizes: Mapping[str, int]) -> RunView:
    episodes = run.episodes.items()
    return run.with_episodes({key: cut(each, sizes.get(key.task_id, len(each.curated))) for key, each in episodes})


def _paired(first: RunView, second: RunView, metric: str, top: int, number: int) -> Pairing:
    refuse_other_dataset(first, second)
    tasks = sorted(first.per_task.keys() & second.per_task.keys())
    if not tasks:
        raise UsageError(f"{first.folder} and {second.folder} have no scored task in common")
    compared = {name: _difference(first, second, tasks, name) for name in dict.fromkeys((*HEADLINE, metric))}
    metrics = {name: difference for name, difference in compared.items() if difference is not None}
    if metric not in metrics:
        known = sorted({name for run in (first, second) for row in run.per_task.values() for name in row})
        raise UsageError(f"there is no metric {metric!r} in both runs; there are: {', '.join(known)}")
    moves = {task: found for task in tasks if (found := _moves(first, second, task, metric))}
    wins, losses = (sum(sign * move[0] > EQUAL for move in moves.values()) for sign in (1, -1))
    changed = [task for task, move in moves.items() if abs(move[0]) > EQUAL]
    changed.sort(key=lambda task: [-abs(round(part, 9)) for part in moves[task]])
    settings = differences(shown_config(first.config), shown_config(second.config))
    return Pairing(
        second=_side(second),
        tasks=len(tasks),
        left_out=(len(first.tasks) - len(tasks), len(second.tasks) - len(tasks)),
        metrics=metrics,
        cards=_card_difference(first, second),
        settings={name: (a, b) for name, a, b in sorted(settings)},
        wins=wins,
        losses=losses,
        ties=len(moves) - wins - losses,
        changed=tuple(_change(first, second, task, metric, number) for task in changed[:top]),
    )


def _card_difference(first: RunView, second: RunView) -> dict[str, tuple[Any, Any]]:
    """Return what decides a run besides its configuration and its tasks, where it differs, with both values."""
    cards = _card(first), _card(second)
    return {name: (value, cards[1][name]) for name, value in cards[0].items() if value != cards[1][name]}


def _card(run: RunView) -> dict[str, Any]:
    inputs, outputs = run.stage.inputs, run.stage.outputs
    return {
        "policy": run.policy,
        "policy hash": str(inputs.get("policy", ""))[:12],
        "format": outputs.get("format"),
        "index": f"{Path(run.index).name} {str(inputs.get('index', ''))[:12]}".strip(),
        "samples": inputs.get("samples"),
        "seed": inputs.get("seed"),
        "fused from": outputs.get("sources"),
    }


def _side(run: RunView) -> Side:
    return Side(str(run.folder), run.policy, len(run.tasks))


def _difference(first: RunView, second: RunView, tasks: Sequence[str], metric: str) -> Difference | None:
    """None where no task has the metric in both runs."""
    a, b = _column(first, tasks, metric), _column(second, tasks, metric)
    both = sorted(a.keys() & b.keys())
    if not both:
        return None
    a, b = {task: a[task] for task in both}, {task: b[task] for task in both}
    resamples = first.config.machine.bootstrap
    return Difference(
        first=math.fsum(a.values()) / len(both),
        second=math.fsum(b.values()) / len(both),
        difference=paired_difference(b, a, resamples),
        p=randomisation_test(b, a, resamples),
        tasks=len(both),
    )


def _column(run: RunView, tasks: Sequence[str], metric: str) -> dict[str, float]:
    return {task: run.per_task[task][metric] for task in tasks if metric in run.per_task[task]}


def _moves(first: RunView, second: RunView, task_id: str, metric: str) -> list[float]:
    """By how much a task moved in the chosen metric, then in those that break ties, as far as both runs have them;
    empty where a run lacks the metric."""
    a, b = first.per_task[task_id], second.per_task[task_id]
    if metric not in a or metric not in b:
        return []
    return [b[name] - a[name] if name in a and name in b else 0.0 for name in (metric, *TIE_BREAKERS)]


def _change(first: RunView, second: RunView, task_id: str, metric: str, number: int) -> Change:
    a, b = first.per_task[task_id][metric], second.per_task[task_id][metric]
    played = [(at, run.samples(task_id)) for at, run in ((0, first), (number, second))]
    address = "#" + ",".join(f"{at}/{quote(samples[0].episode_id, safe='')}" for at, samples in played if samples)
    return Change(task_id, first.tasks[task_id].query, a, b, b - a, address)


def _corrected(pairs: Sequence[Pairing]) -> list[Pairing]:
    """For each metric, p-values of several runs beside the first are one family."""
    if len(pairs) < 2:
        return list(pairs)
    metrics = [dict(pair.metrics) for pair in pairs]
    for name in {name for found in metrics for name in found}:
        family = {str(number): found[name].p for number, found in enumerate(metrics) if name in found}
        for number, p in holm(family).items():
            row = metrics[int(number)]
            row[name] = msgspec.structs.replace(row[name], p_holm=p)
    return [msgspec.structs.replace(pair, metrics=found) for pair, found in zip(pairs, metrics, strict=True)]
