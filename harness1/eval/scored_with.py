"""What a run asked and was scored with: hashes of its questions and of their gold, so that an edited dataset is
noticed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness1.config import Config
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.records import Episode, Task
from harness1.reward import score
from harness1.runs.stage import Stage

SCORING = ("gold", "reward")
"""Inputs of a run that decide its scores, and not its episodes unless its policy sees the gold."""
SCORE_AGAIN = "`harness1 eval` with --rescore scores its episodes again without playing"
SHOWN = 60
"""Characters of a question that a message shows."""


def task_hashes(tasks: Sequence[Task]) -> dict[str, str]:
    """Return the hash of the questions of tasks, and that of their gold, as a card records them."""
    return {
        "queries": digest([[task.task_id, task.query, task.split] for task in tasks]),
        "gold": digest([[task.task_id, task.gold] for task in tasks]),
    }


def refuse_other_queries(
    stage: Stage, folder: Path, tasks: Mapping[str, Task], episodes: Iterable[Episode], way_out: str
) -> None:
    """Accept only the questions that a run asked, by the hash in its card and by its episodes.

    Args:
        tasks: those of the run and possibly others.
        way_out: what the user can do, in words.

    Raises:
        UsageError: a question has changed; the message names the first such task.
    """
    recorded = stage.inputs.get("queries")
    if recorded is not None and recorded == _hash_of("queries", stage, tasks):
        return
    for asked in (episode.task for episode in episodes):
        now = tasks.get(asked.task_id)
        if now is not None and now.query != asked.query:
            raise UsageError(
                f"task {asked.task_id!r} has changed since {folder} was run: it asked {asked.query[:SHOWN]!r}, and the"
                f" dataset asks {now.query[:SHOWN]!r}: {way_out}"
            )
    if recorded is not None:
        raise UsageError(f"questions of tasks that {folder} has not played have changed: {way_out}")


def has_other_gold(stage: Stage, tasks: Mapping[str, Task]) -> bool:
    """Return whether the gold of a run's tasks differs from the one it was scored with; False if its card, of an
    earlier version, does not tell."""
    return "gold" in stage.inputs and stage.inputs["gold"] != _hash_of("gold", stage, tasks)


def refuse_other_gold(stage: Stage, folder: Path, tasks: Mapping[str, Task], way_out: str) -> None:
    """Refuse tasks of which `has_other_gold` is true.

    Raises:
        UsageError: the gold has changed.
    """
    if has_other_gold(stage, tasks):
        raise UsageError(f"{folder} was scored with other gold than its dataset has now: {way_out}")


def refuse_other_rewards(
    folder: Path, tasks: Mapping[str, Task], config: Config, episodes: Iterable[Episode], way_out: str
) -> None:
    """Accept only episodes whose recorded rewards the gold still gives; for a run whose card has no hash of it.

    Raises:
        UsageError: a reward would be another one.
    """
    for each in episodes:
        task = tasks.get(each.task.task_id)
        if each.reward is not None and task is not None and score(each, task.gold, config).reward != each.reward:
            raise UsageError(
                f"{folder} was scored with other gold or other rules, as task {task.task_id!r} shows: {way_out}"
            )


def _hash_of(name: str, stage: Stage, tasks: Mapping[str, Task]) -> str:
    """Return a hash of the tasks of a run, in its order."""
    return task_hashes([tasks[task_id] for task_id in stage.inputs["tasks"] if task_id in tasks])[name]
