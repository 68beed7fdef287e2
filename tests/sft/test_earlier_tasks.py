"""The tasks of earlier work are read from its cards, whatever verb wrote them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness1.data.leaks import Selection
from harness1.data.open import open_source
from harness1.errors import SchemaError, UsageError
from harness1.runs.files import Stage
from harness1.sft.collect import tasks_of_runs

WORLD = "world:60"
NAME = open_source(WORLD).name
CHOSEN = Selection(dataset="scifact", split="train", tasks=9, held_out=("3",), learned=("1", "2"))


def card(folder: Path, verb: str = "run", **outputs: object) -> Path:
    Stage(verb, {}, outputs=outputs).write(folder)
    return folder


def test_tasks_are_those_that_runs_trainings_and_profiles_name_together(tmp_path: Path) -> None:
    one, two = (
        card(tmp_path / verb, verb, selections=[msgspec.to_builtins(CHOSEN)]) for verb in ("rl train", "rl pivots")
    )
    assert tasks_of_runs([one]) == tasks_of_runs([two]) == {("scifact", task) for task in ("1", "2", "3")}
    more = msgspec.structs.replace(CHOSEN, dataset="fm2", learned=("9",), held_out=())
    other = card(tmp_path / "other", "rl train", selections=[msgspec.to_builtins(more)])
    assert tasks_of_runs([one, str(other)]) == tasks_of_runs([one]) | {("fm2", "9")}
    assert tasks_of_runs([]) == frozenset()
    Stage("run", {"dataset": WORLD, "split": "train", "tasks": ["train-1"]}).write(tmp_path / "run")
    assert tasks_of_runs([tmp_path / "run"]) == {(NAME, "train-1")}


def test_a_folder_that_does_not_say_what_it_was_made_of_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", card(tmp_path / "other", "rl train")):
        with pytest.raises(UsageError, match="no card there says"):
            tasks_of_runs([folder])
    broken = ({"selections": [{"dataset": 1}]}, {"selections": "all"})
    for folder in (*(card(tmp_path / str(at), "rl train", **each) for at, each in enumerate(broken)), card(tmp_path)):
        with pytest.raises(SchemaError, match="which tasks it was made of"):
            tasks_of_runs([folder])
