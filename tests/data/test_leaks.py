"""Queries that ask the same are recognised, exactly and nearly."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Data
from harness1.data.leaks import (
    PERMUTATIONS,
    EvaluationSet,
    KnownQueries,
    Leak,
    Leaks,
    Selection,
    TaskFilter,
    evaluation_sets,
    gold_set,
    in_share,
    normalise,
    open_filter,
)
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.memory.dedup import signature
from harness1.records import DocId, Gold, Task

LONG = "In which year did the engineer who designed the bridge over the river found a company"
WORDS = [f"word{number}" for number in range(400)]


def overlapping(rng: random.Random, share: float) -> tuple[list[str], list[str]]:
    """Two sets of words with about this Jaccard similarity."""
    words = rng.sample(WORDS, 60)
    both = round(share * 60)
    rest = (60 - both) // 2
    return words[: both + rest], words[:both] + words[both + rest :]


def test_normalising_leaves_the_words() -> None:
    assert normalise("  Who wrote “Ulysses”, in\t１９２２? ") == "who wrote ulysses in 1922"
    assert normalise("STRASSE") == normalise("straße")


def test_equal_words_and_nearly_equal_ones_are_the_same_and_the_most_similar_is_named() -> None:
    known = KnownQueries(0.8, [("a", f"{LONG} in the old town"), ("b", f"{LONG} in the old town for tea")])
    assert known.match(f"{LONG}, in the Old town!") == "a"
    assert known.match(f"{LONG} in the new town for tea") == "b"
    assert known.match("A painter sold a house in the old town") is None


@pytest.mark.parametrize("near", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_the_match_is_that_of_a_comparison_of_all_hashes(near: float) -> None:
    rng = random.Random(2)
    pairs = [overlapping(rng, rng.random()) for _ in range(200)]
    known = KnownQueries(near, [(str(at), " ".join(one)) for at, (one, _) in enumerate(pairs)])
    table = np.array([np.frombuffer(signature(" ".join(one), PERMUTATIONS, shingle=1), "<u4") for one, _ in pairs])
    for _, other in pairs:
        asked = np.frombuffer(signature(" ".join(other), PERMUTATIONS, shingle=1), "<u4")
        similar = (table == asked).mean(axis=1)
        expected = str(similar.argmax()) if similar.max() >= near else None
        assert known.match(" ".join(other)) == expected


def test_a_query_without_words_matches_only_another() -> None:
    known = KnownQueries(0.5, [("a", "Who?")])
    assert known.match("?!") is None
    known.add("empty", "...")
    assert known.match("?!") == "empty"
    assert known.match("Who?") == "a"


QUERY = "Which river flows past the castle of the king in Rome?"


def gold(*names: str, **graded: int) -> Gold:
    return Gold({**{DocId(name): 1 for name in names}, **{DocId(name): grade for name, grade in graded.items()}})


def names(sets: list[EvaluationSet]) -> list[str]:
    return [each.name for each in sets]


NAMED = Leak("", "d:test/q")


@pytest.mark.parametrize(
    ("held_out", "dataset", "found", "leak"),
    [
        (gold("a", "b"), "d", gold("b", "a"), NAMED),
        (gold("a", "b"), "d", gold("a"), None),
        (gold("a", "b"), "d", gold("a", "b", "c"), None),
        (gold("a", "b"), "d", None, None),
        (gold("a", "b"), "d", Gold({}), None),
        (gold("a", z=0), "d", gold("a", y=0), NAMED),  # what was judged irrelevant is no gold
        (gold("1"), "other", gold("1"), None),  # one id may name different documents in two datasets
        (gold("1", "2"), "made-of-d", gold("2", "1"), NAMED),  # several are the same where one was made from the other
    ],
)
def test_a_leak_is_named_where_the_whole_gold_is_given_away(
    held_out: Gold, dataset: str, found: Gold | None, leak: Leak | None
) -> None:
    leaks = Leaks(0.8, [EvaluationSet("d", "test", [Task("q", QUERY, "test", held_out), Task("none", "What?")])])
    assert leaks.find(dataset, "Who?", gold_set(found)) == leak
    assert leaks.compared == {"d:test": 2}


def test_a_leak_says_what_it_gives_away() -> None:
    leaks = Leaks(0.8, [EvaluationSet("d", "test", [Task("q", QUERY, "test", gold("a", "b"))])])
    assert leaks.find("other", QUERY.upper(), gold_set(gold("c"))) == Leak("d:test/q", "")
    both = leaks.find("d", QUERY, gold_set(gold("a", "b")))
    assert both.reason == "asks the same as d:test/q and has the gold set of d:test/q"


def test_evaluation_sets_are_the_dev_and_test_tasks_of_the_datasets() -> None:
    source = open_source("world:60")
    found = evaluation_sets([source, source], ["world:61:train"])
    assert names(found) == [f"{source.name}:dev", f"{source.name}:test", f"{open_source('world:61').name}:train"]
    assert found[1].tasks == source.tasks("test")


@pytest.mark.parametrize("taught", [("dev",), ("dev", "test")])
def test_a_taught_split_is_none_of_its_own_dataset_but_for_the_test_split(taught: tuple[str, ...]) -> None:
    source = open_source("world:60")
    found = evaluation_sets([source], [], {(source.name, split) for split in taught})
    assert names(found) == [f"{source.name}:test"]


def test_a_further_set_without_a_split_is_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "x"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "who?"}\n')
    (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    assert names(evaluation_sets([], [str(tmp_path)])) == [f"{tmp_path.name}:train"]
    assert names(evaluation_sets([], ["world:60"])) == [f"{open_source('world:60').name}:{s}" for s in ("dev", "test")]


@pytest.mark.parametrize("spec", ["nowhere", "nowhere:test", "world:60:nosplit", "world:many"])
def test_a_further_set_that_does_not_exist_is_refused(spec: str) -> None:
    with pytest.raises(UsageError):
        evaluation_sets([], [spec])


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
    assert TaskFilter(Data()).select("set", "train", tasks)[1].line == ""
    counts = {"tasks": 4, "excluded": 1, "near": 1, "gold": 1, "leaked": 2}
    assert account == Selection(dataset="set", split="train", **counts, compared={"set:test": 1}, learned=("train-3",))
    assert account.line == (
        "set train: left out 1 task of earlier runs, 1 task near a test query and 1 that share a gold set with one (2"
        " in all); 1 of 4 tasks are taken"
    )


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
