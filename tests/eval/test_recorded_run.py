"""The gold of a recorded run, found again by its card."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.eval.run import Run, read_run
from harness1.records import DocId, Gold, Task
from harness1.runs.files import Stage, read_stage
from harness1.runs.folder import REPORT
from harness1.viewer.report import write_report
from tests.eval.run_folders import dataset, episode, run_folder
from tests.viewer.making import some_tasks, write_dataset


def test_gold_is_that_of_the_question_where_datasets_share_an_id(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    write_dataset(first, [Task("one", "Where?")])
    write_dataset(second, [Task("one", "When?"), Task("two", "Who?")])
    judged = second / "qrels" / "test.tsv"
    judged.write_text("query-id\tcorpus-id\tscore\none\tada\t1\ntwo\tada\t1\n")
    run = Run(tmp_path, Stage("run", {}, outputs={"datasets": [str(first), str(second)], "split": "test"}))
    assert run.known_gold[1] == []
    (asked,) = open_source(str(first)).tasks("test")
    assert run.gold_of(asked.public()) == asked.gold
    assert len(asked.gold.relevant if asked.gold else ()) == 3
    other = run.gold_of(Task("one", "When?"))
    assert len(other.relevant) == 1
    assert run.gold_of(Task("one", "Why?")) is None


def test_keeps_gold_and_drops_open_datasets_on_the_way_to_a_worker(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", some_tasks(1))
    run = Run(tmp_path, Stage("run", {"dataset": str(dataset), "split": "test"}))
    assert run.golds
    assert run.sources
    assert pickle.loads(pickle.dumps(run)).__dict__.keys() == run.__dict__.keys() - {"sources"}


def test_secret_answers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("one", "Where?", "test", Gold({DocId("ada"): 1}, answers=("London",)))
    source = Source("secret", "secret", lambda: iter(()), ("test",), lambda split: [task], secret_answers=True)
    monkeypatch.setattr("harness1.eval.run.open_source", lambda place: source)
    run = Run(Path(), Stage("run", {"dataset": "secret", "split": "test"}))
    assert run.gold_of(task) == Gold({DocId("ada"): 1})


def test_only_tasks_that_were_played_have_gold(tmp_path: Path) -> None:
    tasks = some_tasks(3)
    dataset = write_dataset(tmp_path / "data", tasks)
    card = Stage("run", {"dataset": str(dataset), "split": "test", "tasks": ["task-1"]})
    run = Run(tmp_path, card)
    assert [task.task_id for task in tasks if run.gold_of(task)] == ["task-1"]
    moved = msgspec.structs.replace(card, inputs={**card.inputs, "dataset": str(tmp_path / "gone")})
    assert "cannot be opened" in Run(tmp_path, moved).known_gold[1][0]
    assert "names no dataset" in Run(tmp_path, Stage("run", {})).known_gold[1][0]


def test_reads_a_run_that_an_earlier_version_fused(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", {"t1": "one", "t2": "two"})
    fused = run_folder(tmp_path / "fused", data, [episode("t1", "ab"), episode("t2", "a")], fused=[{"samples": 2}])
    stage = read_stage(fused)
    stage.write(
        fused,
        outputs={**stage.outputs, "taken": {"t1": {"turns": 4.0}}, "lines": {"key": stage.outputs["lines"]["key"]}},
    )
    run = read_run(fused)
    assert [run.per_task[name]["turns"] for name in ("t1", "t2")] == [4.0, 0.0]
    assert "reward" not in run.per_task["t1"]
    write_report(fused)
    assert "fused from 2 rollouts" in (fused / REPORT).read_text()
    dataset(tmp_path / "data", {"t1": "one", "t2": "two"}, gold="c")
    assert read_run(fused).per_task["t1"]["curated_recall"] == 0.0  # its card has no hash of its gold
