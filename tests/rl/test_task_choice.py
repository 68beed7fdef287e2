"""Which tasks are learned from and which are watched."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from harness1.config import load_config
from harness1.data.leaks import TaskFilter, gold_set
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import DocId, Gold, Task
from harness1.rl.groups import PlacedTask, jobs_of_group
from harness1.rl.train import choose_tasks
from harness1.sft.collect import take_in_turn


def source(name: str, **counts: int) -> Source:
    def tasks(split: str) -> list[Task]:
        golds = [Gold({DocId(f"{split}-{n}"): 1}) for n in range(counts[split])]
        return [Task(f"{name}-{split}-{n}", f"{split} {n}", split, gold) for n, gold in enumerate(golds)]

    return Source(name, "made", lambda: iter(()), tuple(counts), tasks)


def ids(placed: list) -> set[str]:
    return {each.task.task_id for each in placed}


CONFIG = load_config(None, ["train.watch.tasks=6"])


def test_a_split_dev_is_watched_and_all_of_train_is_learned() -> None:
    choice = choose_tasks([source("a", train=8, dev=20)], "train", [None], CONFIG)
    assert ids(choice.tasks) == {f"a-train-{n}" for n in range(8)}
    assert [each.task.task_id for each in choice.held_out] == [f"a-dev-{n}" for n in range(6)]


def test_without_a_split_dev_some_tasks_are_held_out_and_never_learned() -> None:
    choice = choose_tasks([source("a", train=30), source("b", train=30)], "train", [None, None], CONFIG)
    assert (len(choice.held_out), {each.setup for each in choice.held_out}) == (6, {0, 1})
    assert not ids(choice.tasks) & ids(choice.held_out)
    assert choice == choose_tasks([source("a", train=30), source("b", train=30)], "train", [None, None], CONFIG)


def test_tasks_that_were_not_admitted_are_not_sampled() -> None:
    admitted = frozenset({"a-train-1", "a-train-5"})
    choice = choose_tasks([source("a", train=8, dev=3)], "train", [admitted], CONFIG)
    assert ids(choice.tasks) == admitted
    with pytest.raises(UsageError, match="admitted"):
        choose_tasks([source("a", train=8, dev=3)], "train", [frozenset()], CONFIG)


def with_gold(tasks: list[Task], **golds: str) -> list[Task]:
    """Tasks of which some, by number, have the one relevant document that is named."""
    changed = {int(number[1:]): Gold({DocId(name): 1}) for number, name in golds.items()}
    return [msgspec.structs.replace(task, gold=changed.get(n, task.gold)) for n, task in enumerate(tasks)]


def test_tasks_that_leak_into_an_evaluation_split_are_not_learned() -> None:
    made = source("a", train=8, dev=3, test=3)
    tasks = {split: made.tasks(split) for split in made.splits}
    tasks["train"] = with_gold(tasks["train"], n0="test-1", n1="dev-2")
    tasks["train"][2] = msgspec.structs.replace(tasks["train"][2], query="TEST 0")
    tasks["dev"] = with_gold(tasks["dev"], n0="test-2")
    leaky = replace(made, read_tasks=tasks.__getitem__)
    choice = choose_tasks([leaky], "train", [None], CONFIG)
    assert ids(choice.tasks) == {f"a-train-{n}" for n in range(3, 8)}
    assert ids(choice.held_out) == {"a-dev-1", "a-dev-2"}
    (account,) = choice.selections
    assert (account.near, account.gold, account.leaked) == (1, 2, 3)
    assert account.compared == {"a:dev": 3, "a:test": 3}
    everything = choose_tasks([leaky], "train", [None], load_config(None, ["train.watch.tasks=6", "data.leaks=keep"]))
    assert (len(everything.tasks), len(everything.held_out)) == (8, 3)


def test_what_is_learned_gives_away_no_task_that_was_held_out() -> None:
    tasks = with_gold(source("a", train=30).tasks("train"), **{f"n{n}": f"pair-{n // 2}" for n in range(30)})
    made = Source("a", "made", lambda: iter(()), ("train",), lambda _: tasks)
    choice = choose_tasks([made], "train", [None], CONFIG)
    golds = [{gold_set(each.task.gold) for each in some} for some in choice[:2]]
    assert not golds[0] & golds[1]
    (account,) = choice.selections
    assert account.beside > 0
    assert len(account.learned) + len(account.held_out) + account.beside == 30
    assert set(account.learned) == ids(choice.tasks)


def test_a_dataset_of_which_nothing_is_left_is_refused_with_the_reason() -> None:
    made = source("a", train=2, test=2)
    tasks = {split: with_gold(made.tasks(split), n0="one", n1="two") for split in made.splits}
    with pytest.raises(UsageError, match=r"a train: left out 2 tasks that share a gold set with a test task; 0 of 2"):
        choose_tasks([replace(made, read_tasks=tasks.__getitem__)], "train", [None], CONFIG)


def test_a_share_and_earlier_runs_limit_the_tasks() -> None:
    made = source("a", train=20)
    config = load_config(None, ["train.watch.tasks=0"])
    sieves = [TaskFilter(config.data, share=share) for share in ("sft", "rl")]
    halves = [choose_tasks([made], "train", [None], config, sieve) for sieve in sieves]
    assert [len(half.tasks) for half in halves] == [6, 14]
    assert not ids(halves[0].tasks) & ids(halves[1].tasks)
    earlier = {("a", name) for name in ids(halves[0].tasks)}
    rest = choose_tasks([made], "train", [None], config, TaskFilter(config.data, excluded=earlier))
    assert ids(rest.tasks) == ids(halves[1].tasks)


def test_the_split_that_is_tested_on_is_refused() -> None:
    with pytest.raises(UsageError, match="is for testing"):
        choose_tasks([open_source("world:60")], "test", [None], CONFIG)


TASKS = [PlacedTask(Task(f"t{n}", f"q{n}", "train", Gold({DocId("d"): 1})), n % 2) for n in range(5)]


def test_every_pass_has_all_tasks_in_an_order_of_its_own() -> None:
    passes = [
        [jobs_of_group(TASKS, at, 4, 3)[0].task.task_id for at in range(start, start + 5)] for start in (0, 5, 10, 15)
    ]
    assert all(sorted(each) == [f"t{n}" for n in range(5)] for each in passes)
    assert len(set(map(tuple, passes))) > 1
    assert jobs_of_group(TASKS, 13, 4, 3) != jobs_of_group(TASKS, 13, 4, 4)


def test_no_two_episodes_of_a_training_share_number_or_seed() -> None:
    jobs = [job for index in range(50) for job in jobs_of_group(TASKS, index, 4, 0)]
    assert ([job.sample_idx for job in jobs], len({job.seed for job in jobs})) == (list(range(200)), 200)
    assert {job.group_id for job in jobs} == {str(index) for index in range(50)}
    assert all(job.setup == int(job.task.task_id[1:]) % 2 for job in jobs)


def test_held_out_tasks_are_taken_of_each_dataset_in_turn() -> None:
    chosen = take_in_turn([TASKS[:3], TASKS[3:]], 4)
    assert ([placed.task.task_id for placed in chosen], take_in_turn([], 4)) == (["t0", "t3", "t1", "t4"], [])
