"""Tasks that give an evaluation task away are found, by their words and by their gold."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness1.data.leaks import EvaluationSet, Leak, Leaks, evaluation_sets, gold_set
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.records import DocId, Gold, Task

QUERY = "Which river flows past the castle of the king in Rome?"


def gold(*names: str, **graded: int) -> Gold:
    return Gold({**{DocId(name): 1 for name in names}, **{DocId(name): grade for name, grade in graded.items()}})


def leaks_of(*tasks: Task, dataset: str = "d") -> Leaks:
    return Leaks(0.8, [EvaluationSet(dataset, "test", tasks)])


def names(sets: list[EvaluationSet]) -> list[str]:
    return [each.name for each in sets]


def test_a_leak_is_named_with_the_task_that_it_gives_away() -> None:
    leaks = leaks_of(Task("q", QUERY, "test", gold("a", "b")))
    assert leaks.compared == {"d:test": 1}
    assert leaks.find("d", QUERY.upper(), gold_set(gold("a"))) == Leak("d:test/q", "")
    assert leaks.find("d", "Who?", gold_set(gold("b", "a"))) == Leak("", "d:test/q")
    both = leaks.find("d", QUERY, gold_set(gold("a", "b")))
    assert both is not None
    assert both.reason == "asks the same as d:test/q and has the gold set of d:test/q"


@pytest.mark.parametrize("found", [gold("a"), gold("a", "b", "c"), None, Gold({})])
def test_a_part_of_the_gold_or_more_than_it_is_no_leak(found: Gold | None) -> None:
    leaks = leaks_of(Task("q", QUERY, "test", gold("a", "b")), Task("none", "What?", "test"))
    assert leaks.find("d", "Who?", gold_set(found)) is None


def test_documents_that_were_judged_irrelevant_are_no_gold() -> None:
    leaks = leaks_of(Task("q", QUERY, "test", gold("a", z=0)))
    assert leaks.find("d", "Who?", gold_set(gold("a", y=0))) == Leak("", "d:test/q")


def test_one_id_may_name_different_documents_in_two_datasets() -> None:
    leaks = leaks_of(Task("q", QUERY, "test", gold("1")), dataset="other")
    assert leaks.find("d", "Who?", gold_set(gold("1"))) is None
    assert leaks.find("d", QUERY, gold_set(gold("2"))) == Leak("other:test/q", "")


def test_several_documents_of_gold_are_the_same_in_a_dataset_that_was_made_from_another_one() -> None:
    leaks = leaks_of(Task("q", QUERY, "test", gold("1", "2")), dataset="corpus")
    assert leaks.find("made-corpus", "Who?", gold_set(gold("2", "1"))) == Leak("", "corpus:test/q")


def test_evaluation_sets_are_the_dev_and_test_tasks_of_the_datasets() -> None:
    source = open_source("world:60")
    found = evaluation_sets([source, source], ["world:61:train"])
    assert names(found) == [f"{source.name}:dev", f"{source.name}:test", f"{open_source('world:61').name}:train"]
    assert found[1].tasks == source.tasks("test")


def test_the_split_that_was_taught_is_none_of_its_own_dataset() -> None:
    source = open_source("world:60")
    assert "dev" in source.splits
    found = evaluation_sets([source], [], {(source.name, "dev")})
    assert names(found) == [f"{source.name}:test"]


def test_the_test_split_counts_whatever_was_taught() -> None:
    source = open_source("world:60")
    found = evaluation_sets([source], [], {(source.name, "dev"), (source.name, "test")})
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
