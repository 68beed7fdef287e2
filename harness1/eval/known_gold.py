"""The gold of a recorded run: of an evaluation, a collection or a training, from the datasets that its card names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.eval.scored_with import has_other_gold
from harness1.records import Gold, Task
from harness1.runs.stage import Stage

TaskKey = tuple[str, str]
"""Id and question of a task; several datasets may use one id."""


@dataclass(frozen=True)
class KnownGold:
    """The gold of the tasks of a run; empty if a dataset cannot be opened.

    Attributes:
        notes: one line for what is missing or has changed, with the consequences for the reader.
    """

    golds: Mapping[TaskKey, Gold] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def of(self, task: Task) -> Gold | None:
        """Return the gold of a recorded task, if it is known."""
        return self.golds.get((task.task_id, task.query))


def known_gold(stage: Stage) -> KnownGold:
    """Return the gold of the tasks of the run that a card describes."""
    split = stage.inputs.get("split") or stage.outputs.get("split")
    places = places_of(stage)
    if not split or not all(places):
        return KnownGold(notes=["Its card names no dataset and split: there are no gold marks and no recall."])
    try:
        sources = [open_source(place) for place in places]
        tasks = [(source, task) for source in sources for task in source.tasks(str(split))]
    except (UsageError, OSError) as error:
        return KnownGold(notes=[f"Its dataset cannot be opened ({error}): there are no gold marks and no recall."])
    played = stage.inputs.get("tasks")
    notes = []
    if played is not None and has_other_gold(stage, {task.task_id: task for _, task in tasks}):
        notes = ["Its gold has changed since it was scored: marks and recall are of the new gold, rewards are not."]
    wanted = None if played is None else set(played)
    golds = {
        (task.task_id, task.query): _public(source, task.gold)
        for source, task in tasks
        if task.gold is not None and (wanted is None or task.task_id in wanted)
    }
    return KnownGold(golds, notes)


def places_of(stage: Stage) -> list[str]:
    """Return where the datasets of a run are, or "" for one that its card does not name."""
    named = stage.outputs.get("datasets") or [stage.outputs.get("source") or stage.inputs.get("dataset")]
    return [str(place or "") for place in named]


def _public(source: Source, gold: Gold) -> Gold:
    """Return gold without answers that must not be written anywhere."""
    return msgspec.structs.replace(gold, answers=()) if source.secret_answers else gold
