"""Which tasks of a split are learned from, and what is said of the others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Data
from harness1.data.leaks import EvaluationSet, Selection, TaskFilter, gold_set, in_share, open_filter
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.records import DocId, Gold, Task

golds = st.lists(st.frozensets(st.sampled_from("abcd"), max_size=2), max_size=40)


def made(*wanted: frozenset[str] | str, split: str = "train") -> list[Task]:
    """A task with a query of its own for each gold set."""
    return [
        Task(f"{split}-{n}", f"{split} asks for number {n} of its own", split, Gold({DocId(name): 1 for name in each}))
        for n, each in enumerate(wanted)
    ]


def ids(tasks: list[Task]) -> list[str]:
    return [task.task_id for task in tasks]


@given(wanted=golds, share=st.floats(0.0, 1.0))
def test_the_shares_divide_the_tasks_and_keep_equal_gold_sets_together(
    wanted: list[frozenset[str]], share: float
) -> None:
    tasks, data = made(*wanted), Data(sft_share=share)
    sft, rl = in_share(tasks, "sft", data), in_share(tasks, "rl", data)
    assert sorted(ids(sft) + ids(rl)) == sorted(ids(tasks))
    assert not ({gold_set(task.gold) for task in sft} & {gold_set(task.gold) for task in rl}) - {frozenset()}
    assert sorted(ids(in_share(tasks[::-1], "sft", data))) == sorted(ids(sft))
    largest = max(
        Counter(gold_set(task.gold) for task in tasks if task.gold and task.gold.relevant).values(), default=1
    )
    assert round(share * len(tasks)) - largest < len(sft) <= round(share * len(tasks))


def test_the_published_share_is_met_exactly_where_gold_sets_differ() -> None:
    tasks = [Task(str(n), f"q{n}", "train", Gold({DocId(str(n)): 1})) for n in range(664)]
    assert (len(in_share(tasks, "sft", Data())), len(in_share(tasks, "rl", Data()))) == (199, 465)
    assert in_share(tasks, "", Data()) == tasks


def test_each_step_of_the_choice_is_counted_and_said_in_one_line() -> None:
    tasks = made("a", "b", "c", "d")
    tested = [Task("q", tasks[1].query.upper(), "test", Gold({DocId("c"): 1}))]
    sieve = TaskFilter(Data(), [EvaluationSet("set", "test", tested)], "", {("set", "train-0"), ("other", "train-3")})
    kept, account = sieve.select("set", "train", tasks)
    assert ids(kept) == ["train-3"]
    assert account == Selection(
        dataset="set",
        split="train",
        tasks=4,
        excluded=1,
        near=1,
        gold=1,
        leaked=2,
        compared={"set:test": 1},
        learned=("train-3",),
    )
    assert account.line == (
        "set train: left out 1 task of earlier runs, 1 task near a test query and 1 that share a gold set with one (2"
        " in all); 1 of 4 tasks are taken"
    )


def test_nothing_is_said_where_nothing_is_left_out() -> None:
    kept, account = TaskFilter(Data()).select("set", "train", made("a", "b"))
    assert (ids(kept), account.line) == (["train-0", "train-1"], "")


def test_leaks_are_kept_where_the_settings_say_so_and_nothing_is_compared_then() -> None:
    source, keep = open_source("world:60"), Data(leaks="keep")
    sieve = open_filter(keep, [source], {(source.name, "train")})
    kept, account = sieve.select(source.name, "train", source.tasks("test"))
    assert kept == source.tasks("test")
    assert account.compared == {}
    assert sieve.beside(kept, source.name, kept) == kept
    with pytest.raises(UsageError, match=r"data\.leaks=keep turns off"):
        open_filter(keep, [source], {(source.name, "train")}, against=["world:61"])


def test_validation_tasks_give_away_no_other_evaluation_set() -> None:
    test, dev = made("a", split="test"), made("a", "b", split="dev")
    sieve = TaskFilter(Data(), [EvaluationSet("set", "dev", dev), EvaluationSet("set", "test", test)])
    assert ids(sieve.validation("set", "dev", dev)) == ["dev-1"]
