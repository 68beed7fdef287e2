"""The gold of a recorded run, found again by its card."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.eval.known_gold import known_gold
from harness1.records import DocId, Gold, Task
from harness1.runs.stage import Stage
from tests.viewer.making import some_tasks, write_dataset


def test_gold_is_that_of_the_question_where_datasets_share_an_id(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    write_dataset(first, [Task("one", "Where?")])
    write_dataset(second, [Task("one", "When?"), Task("two", "Who?")])
    judged = second / "qrels" / "test.tsv"
    judged.write_text("query-id\tcorpus-id\tscore\none\tada\t1\ntwo\tada\t1\n")
    card = Stage("run", {}, outputs={"datasets": [str(first), str(second)], "split": "test"})
    known = known_gold(card)
    assert known.notes == []
    (asked,) = open_source(str(first)).tasks("test")
    assert known.of(asked.public()) == asked.gold
    assert len(asked.gold.relevant if asked.gold else ()) == 3
    other = known.of(Task("one", "When?"))
    assert other is not None
    assert len(other.relevant) == 1
    assert known.of(Task("one", "Why?")) is None


def test_secret_answers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("one", "Where?", "test", Gold({DocId("ada"): 1}, answers=("London",)))
    source = Source("secret", "secret", lambda: iter(()), ("test",), lambda split: [task], secret_answers=True)
    monkeypatch.setattr("harness1.eval.known_gold.open_source", lambda place: source)
    found = known_gold(Stage("run", {"dataset": "secret", "split": "test"})).of(task)
    assert found == Gold({DocId("ada"): 1})


def test_only_tasks_that_were_played_have_gold(tmp_path: Path) -> None:
    tasks = some_tasks(3)
    dataset = write_dataset(tmp_path / "data", tasks)
    card = Stage("run", {"dataset": str(dataset), "split": "test", "tasks": ["task-1"]})
    assert [task.task_id for task in tasks if known_gold(card).of(task)] == ["task-1"]
    moved = msgspec.structs.replace(card, inputs={**card.inputs, "dataset": str(tmp_path / "gone")})
    assert "cannot be opened" in known_gold(moved).notes[0]
    assert "names no dataset" in known_gold(Stage("run", {})).notes[0]
