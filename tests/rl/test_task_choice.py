"""Which tasks are learned from and which are watched."""

from __future__ import annotations

import pytest

from harness1.config import load_config
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import DocId, Gold, Task
from harness1.rl.task_stream import choose_tasks


def source(name: str, **counts: int) -> Source:
    gold = Gold({DocId("d"): 1})
    tasks = {
        split: [Task(f"{name}-{split}-{n}", f"q{n}", split, gold) for n in range(count)]
        for split, count in counts.items()
    }
    return Source(name, "made", lambda: iter(()), tuple(counts), tasks.__getitem__)


def ids(placed: list) -> set[str]:
    return {each.task.task_id for each in placed}


CONFIG = load_config(None, ["train.watch.tasks=6"])


def test_a_split_dev_is_watched_and_all_of_train_is_learned() -> None:
    choice = choose_tasks([source("a", train=8, dev=20)], "train", [None], CONFIG)
    assert ids(choice.tasks) == {f"a-train-{n}" for n in range(8)}
    assert [each.task.task_id for each in choice.held_out] == [f"a-dev-{n}" for n in range(6)]


def test_without_a_split_dev_some_tasks_are_held_out_and_never_learned() -> None:
    choice = choose_tasks([source("a", train=30), source("b", train=30)], "train", [None, None], CONFIG)
    assert len(choice.held_out) == 6
    assert {each.setup for each in choice.held_out} == {0, 1}
    assert not ids(choice.tasks) & ids(choice.held_out)
    assert choice == choose_tasks([source("a", train=30), source("b", train=30)], "train", [None, None], CONFIG)


def test_tasks_that_were_not_admitted_are_not_sampled() -> None:
    admitted = frozenset({"a-train-1", "a-train-5"})
    choice = choose_tasks([source("a", train=8, dev=3)], "train", [admitted], CONFIG)
    assert ids(choice.tasks) == admitted
    with pytest.raises(UsageError, match="admitted"):
        choose_tasks([source("a", train=8, dev=3)], "train", [frozenset()], CONFIG)


def test_the_split_that_is_tested_on_is_refused() -> None:
    with pytest.raises(UsageError, match="is for testing"):
        choose_tasks([open_source("world:60")], "test", [None], CONFIG)
