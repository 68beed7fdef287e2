"""Comparison of runs on the same tasks: paired differences with their significance, and other differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from harness1.config.settings import differences
from harness1.errors import UsageError
from harness1.eval.compare.differences import Difference, corrected, differences_of
from harness1.eval.failure import Faults
from harness1.eval.metrics import HEADLINE
from harness1.eval.run import Run
from harness1.eval.summary import cut
from harness1.records import Record, Status
from harness1.reward.measures import delivered
from harness1.runs.folder import shown_config

TIE_BREAKERS = ("trajectory_recall", "reward")
"""Metrics that order tasks with an equal change in the chosen metric."""

EQUAL = 1e-9
"""Two means over samples are equal if they differ by less than this."""


class Side(Record):
    """One of the runs."""

    folder: str
    policy: str
    tasks: int
    """All tasks of the run, scored or not."""
    broken: int = 0
    """Episodes that the infrastructure broke."""
    faults: Faults = "exclude"
    """How these count in the run's means."""


class Change(Record):
    """A task with a different result."""

    task_id: str
    query: str
    first: float
    second: float
    change: float
    address: str
    """Address of the task's first episodes, side by side, in a viewer file of the runs."""


class Pairing(Record):
    """One run compared with the first."""

    second: Side
    tasks: int
    """Common tasks, scored in both."""
    left_out: tuple[int, int]
    """Numbers of other tasks: those of the first, and those of the second."""
    fell_out: dict[str, int]
    """Numbers of these tasks by what they lack: `first: infrastructure`, where it broke all their episodes there,
    `first: not played`, or `first: no such task`; and for the second alike."""
    metrics: dict[str, Difference]
    cards: dict[str, tuple[Any, Any]]
    settings: dict[str, tuple[Any, Any]]
    wins: int
    """Tasks on which the second has the higher value of the chosen metric."""
    losses: int
    ties: int
    changed: tuple[Change, ...]
    """Tasks whose value of the chosen metric changed, largest change first."""


class Comparison(Record):
    """Runs, each compared with the first of them."""

    metric: str
    """The metric by which tasks are won and lost."""
    equal_size: bool
    first: Side
    others: tuple[Pairing, ...]


def compare(runs: Sequence[Run], metric: str = "curated_recall", top: int = 10, equal_size: bool = False) -> Comparison:
    """Compare every further run with the first.

    Args:
        metric: the metric by which tasks are won, lost or changed.
        top: most changed tasks to keep.
        equal_size: compare ranked sets of one size (see `at_equal_size`).

    Raises:
        UsageError: there are fewer than two runs, their tasks differ, or one has no such metric.
    """
    if len(runs) < 2:
        raise UsageError("a comparison needs at least two runs")
    first, *others = runs
    pairs = [
        _paired(*(at_equal_size(first, other) if equal_size else (first, other)), metric, top, number)
        for number, other in enumerate(others, start=1)
    ]
    return Comparison(metric, equal_size, _side(first), tuple(_corrected(pairs)))


def at_equal_size(first: Run, second: Run) -> tuple[Run, Run]:
    """Return both runs with their ranked sets cut, task by task, to the smallest that any sample of either delivered.
    Tasks not scored in both are unchanged."""
    sizes, others = _sizes(first), _sizes(second)
    common = {task_id: min(sizes[task_id], others[task_id]) for task_id in sizes.keys() & others.keys()}
    return _cut(first, common), _cut(second, common)


def _sizes(run: Run) -> dict[str, int]:
    """Return the size of the smallest set for each scored task; a task without an episode delivered nothing."""
    found: dict[str, list[int]] = {task_id: [] for task_id in run.per_task}
    for key, episode in run.episodes.items():
        if episode.status is not Status.INFRA_ERROR:
            found[key.task_id].append(len(delivered(episode)))
    return {task_id: min(sizes, default=0) for task_id, sizes in found.items()}


def _cut(run: Run, sizes: Mapping[str, int]) -> Run:
    episodes = run.episodes.items()
    return run.with_episodes({key: cut(each, sizes.get(key.task_id, len(each.curated))) for key, each in episodes})


def _paired(first: Run, second: Run, metric: str, top: int, number: int) -> Pairing:
    first.refuse_other_dataset(second)
    tasks = sorted(first.per_task.keys() & second.per_task.keys())
    if not tasks:
        raise UsageError(f"{first.folder} and {second.folder} have no scored task in common")
    names = dict.fromkeys((*HEADLINE, metric))
    metrics = differences_of(first.per_task, second.per_task, names, first.config.machine.bootstrap)
    if metric not in metrics:
        known = sorted({name for run in (first, second) for row in run.per_task.values() for name in row})
        raise UsageError(f"no metric {metric!r} in both runs; choose from: {', '.join(known)}")
    moves = {task: found for task in tasks if (found := _moves(first, second, task, metric))}
    wins, losses = (sum(sign * move[0] > EQUAL for move in moves.values()) for sign in (1, -1))
    changed = [task for task, move in moves.items() if abs(move[0]) > EQUAL]
    changed.sort(key=lambda task: [-abs(round(part, 9)) for part in moves[task]])
    settings = differences(shown_config(first.config), shown_config(second.config))
    return Pairing(
        second=_side(second),
        tasks=len(tasks),
        left_out=(len(first.tasks) - len(tasks), len(second.tasks) - len(tasks)),
        fell_out=dict(sorted(Counter(_lacks(first, second)).items())),
        metrics=metrics,
        cards={name: (a, b) for name, a, b in differences(_card(first), _card(second))},
        settings={name: (a, b) for name, a, b in sorted(settings)},
        wins=wins,
        losses=losses,
        ties=len(moves) - wins - losses,
        changed=tuple(_change(first, second, task, metric, number) for task in changed[:top]),
    )


def _lacks(first: Run, second: Run) -> Iterator[str]:
    """Yield what each task that is not scored in both runs lacks in the one and in the other."""
    for name, run in (("first", first), ("second", second)):
        for task_id in (first.tasks.keys() | second.tasks.keys()) - run.per_task.keys():
            if task_id not in run.tasks:
                yield f"{name}: no such task"
            else:
                yield f"{name}: infrastructure" if run.samples(task_id) else f"{name}: not played"


def _card(run: Run) -> dict[str, Any]:
    """Return everything that determines a run besides its configuration and its tasks."""
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


def _side(run: Run) -> Side:
    broken = sum(episode.status is Status.INFRA_ERROR for episode in run.episodes.values())
    return Side(str(run.folder), run.policy, len(run.tasks), broken, run.faults)


def _moves(first: Run, second: Run, task_id: str, metric: str) -> list[float]:
    """Return a task's change in the chosen metric, then in the tie breakers (0 if undefined); empty if the
    chosen metric is undefined."""
    a, b = first.per_task[task_id], second.per_task[task_id]
    if metric not in a or metric not in b:
        return []
    return [b[name] - a[name] if name in a and name in b else 0.0 for name in (metric, *TIE_BREAKERS)]


def _change(first: Run, second: Run, task_id: str, metric: str, number: int) -> Change:
    a, b = first.per_task[task_id][metric], second.per_task[task_id][metric]
    played = [(at, run.samples(task_id)) for at, run in ((0, first), (number, second))]
    address = "#" + ",".join(f"{at}/{quote(samples[0].episode_id, safe='')}" for at, samples in played if samples)
    return Change(task_id, first.tasks[task_id].query, a, b, b - a, address)


def _corrected(pairs: Sequence[Pairing]) -> list[Pairing]:
    metrics = corrected([pair.metrics for pair in pairs])
    return [msgspec.structs.replace(pair, metrics=found) for pair, found in zip(pairs, metrics, strict=True)]
