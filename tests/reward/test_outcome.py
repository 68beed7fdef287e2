from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.errors import UsageError
from harness1.records import (
    STATUS_OF,
    Curated,
    Episode,
    Gold,
    Hashes,
    ModelCall,
    Note,
    Observation,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.reward.measures import DEPTHS, MEASURES, Outcome, delivery, measure_outcome, targets

GOLD = Gold(relevant={"a": 2, "b": 1, "c": 1, "d": 1, "junk": 0}, answer_docs=("a", "b"))
UNITS = st.sampled_from("abcdefgh")
SETS = st.lists(UNITS, unique=True)


def finished(curated: Any = "", pool: Any = "", stop: StopReason = StopReason.END_SEARCH, **more: Any) -> Episode:
    ranked = tuple(Curated(unit, "fair", rank) for rank, unit in enumerate(curated, 1))
    given = {
        "episode_id": "e",
        "task": Task("t1", "query"),
        "stop_reason": stop,
        "status": STATUS_OF[stop],
        "hashes": Hashes("", "", ""),
        "curated": ranked,
        "pool": tuple(pool),
    }
    return Episode(**(given | more))


def did(name: str, error: str | None = None) -> Turn:
    return Turn(0, action=ToolCall(name), observation=Observation(name, error=Note(error) if error else None))


def recalls(found: Outcome) -> list[float]:
    return [found.ranked[f"R@{depth}"] for depth in DEPTHS]


def test_documents_by_hand() -> None:
    # Delivered a, x, c, y; relevant a b c d; answer a b; seen a, b, c, x, y.
    found = measure_outcome(finished("axcy", "axcyb"), GOLD)
    assert found.recall == 2 / 4
    assert found.precision == 2 / 4
    assert found.f1 == 0.5
    assert found.answer_recall == 1 / 2
    assert found.trajectory_recall == 3 / 4
    assert found.trajectory_answer_recall == 1.0
    assert recalls(found) == [0.25, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert found.set_size == 4
    assert found.selection_loss == 1 / 4


def test_grades_and_order_are_in_the_ranked_measures() -> None:
    best, worse = (measure_outcome(finished(order), GOLD).ranked["nDCG@10"] for order in ("abcd", "bacd"))
    assert best == 1.0
    assert 0.0 < worse < 1.0


def test_a_unit_that_a_record_names_twice_counts_once() -> None:
    assert measure_outcome(finished("aax"), GOLD) == measure_outcome(finished("ax"), GOLD)


def test_what_is_delivered_is_ranked_without_repeats_and_nothing_after_a_policy_error() -> None:
    curated = (Curated("b", "low", 2), Curated("a", "high", 1), Curated("b", "fair", 3))
    assert delivery(msgspec.structs.replace(finished(), curated=curated)) == ("a", "b")
    assert delivery(finished("ab", stop=StopReason.FORMAT_LIMIT)) == ()


def test_grade_zero_is_not_relevant() -> None:
    found = measure_outcome(finished(["junk"], ["junk"]), GOLD)
    assert found == measure_outcome(finished("z", "z"), GOLD)
    assert (found.recall, found.precision, found.trajectory_recall) == (0.0, 0.0, 0.0)


def test_without_answer_docs_the_answer_is_all_that_is_relevant() -> None:
    found = measure_outcome(finished("ab", "abc"), Gold(relevant={"a": 1, "b": 1, "c": 1, "d": 1}))
    assert (found.answer_recall, found.trajectory_answer_recall) == (0.5, 0.75)


def test_rank_decides_recall_at_k_whatever_the_order_of_the_list() -> None:
    shuffled = (Curated("a", "fair", 2), Curated("x", "fair", 1))
    found = measure_outcome(msgspec.structs.replace(finished(), curated=shuffled), GOLD)
    assert recalls(found)[:2] == [0.0, 0.25]


def test_a_fact_is_found_by_any_of_its_chunks_and_only_once() -> None:
    gold = Gold(relevant={}, facts=(("c1", "c2"), ("c3",), ("c4", "c5")), answer_facts=(1,))
    found = measure_outcome(finished(["c1", "c2", "x"], ["c1", "c2", "x", "c3"], unit="chunk"), gold)
    assert found.recall == 1 / 3
    assert found.precision == 2 / 3
    assert (found.answer_recall, found.trajectory_answer_recall) == (0.0, 1.0)
    assert found.trajectory_recall == 2 / 3
    assert recalls(found)[0] == 1 / 3
    every = msgspec.structs.replace(gold, answer_facts=())
    assert measure_outcome(finished(["c1"], unit="chunk"), every).answer_recall == 1 / 3


def test_a_hidden_duplicate_counts_as_seen_and_in_alias_variants_alone_as_curated() -> None:
    hiding = finished("xy", "xy", aliases={"a": "x", "b": "x", "c": "z"})
    found = measure_outcome(hiding, GOLD)
    assert found.trajectory_recall == 3 / 4
    assert (found.recall, found.precision, found.answer_recall) == (0.0, 0.0, 0.0)
    assert (found.recall_alias, found.precision_alias, found.answer_recall_alias) == (2 / 4, 1 / 2, 1.0)


def test_a_policy_error_delivers_nothing_but_keeps_what_it_saw() -> None:
    failed = measure_outcome(finished("abcd", "abcd", StopReason.FORMAT_LIMIT), GOLD)
    assert failed.set_size == 0
    assert failed.trajectory_recall == 1.0
    shares = (failed.recall, failed.precision, failed.f1, failed.f2, failed.answer_recall, failed.recall_alias)
    assert shares == (0.0,) * 6
    assert set(failed.ranked.values()) == {0.0}
    assert measure_outcome(finished("abcd", "abcd", StopReason.CONTEXT_LIMIT), GOLD).recall == 1.0


def test_only_calls_that_succeeded_are_use_and_ending_is_never_counted() -> None:
    turns = (did("search"), did("curate"), did("search"), did("grep", error="bad_pattern"), did("end_search"))
    unreadable = Turn(5, parse_error="no call", calls=(ModelCall("1"), ModelCall("2", attempt=1)))
    retried = msgspec.structs.replace(did("search"), calls=(ModelCall("3"), ModelCall("4", attempt=1)))
    found = measure_outcome(finished("a", turns=(*turns, retried, unreadable)), GOLD)
    assert found.calls == {"search": 3, "curate": 1}
    assert (found.tools, found.curate_calls, found.tool_errors) == (2, 1, 1)
    assert found.turns == 6
    assert found.format_errors == 3


@pytest.mark.parametrize(
    ("gold", "unit", "what"),
    [
        (None, "document", "no gold"),
        (Gold(relevant={}), "document", "no relevant"),
        (Gold(relevant={"a": 0}), "document", "no relevant"),
        (Gold(relevant={"a": 1}), "chunk", "no facts"),
        (Gold(relevant={"a": 1}, facts=((),)), "chunk", "no chunk"),
        (Gold(relevant={"a": 1}, facts=(("c",),), answer_facts=(1,)), "chunk", "beyond"),
    ],
)
def test_gold_with_nothing_to_find_is_refused_by_the_name_of_its_task(gold: Any, unit: Any, what: str) -> None:
    with pytest.raises(UsageError, match=f"'t1'.*{what}"):
        targets("t1", gold, unit)
    with pytest.raises(UsageError, match="'t1'"):
        measure_outcome(finished("a", unit=unit), gold)


def shares(found: Outcome) -> list[float]:
    plain = [value for value in msgspec.structs.astuple(found) if isinstance(value, float)]
    return [*plain, *found.ranked.values()]


@given(SETS, SETS, st.dictionaries(st.sampled_from("pqab"), UNITS), st.sampled_from(StopReason))
def test_shares_are_shares_and_aliases_only_add(curated: Any, pool: Any, aliases: Any, stop: StopReason) -> None:
    found = measure_outcome(finished(curated, pool, stop, aliases=aliases), GOLD)
    assert all(0.0 <= share <= 1.0 for share in shares(found))
    assert found.recall_alias >= found.recall
    assert found.precision_alias >= found.precision
    assert recalls(found) == sorted(recalls(found))
    assert recalls(found)[-1] == found.recall
    assert found.ranked.keys() == MEASURES.keys()


@given(SETS, st.sampled_from("abcd"))
def test_one_more_relevant_unit_never_lowers_a_recall(curated: list[str], extra: str) -> None:
    if extra in curated:
        curated.remove(extra)
    before, after = (measure_outcome(finished(ids, ids), GOLD) for ids in (curated, [*curated, extra]))
    assert after.recall == before.recall + 0.25
    assert after.answer_recall >= before.answer_recall
    assert after.trajectory_recall > before.trajectory_recall
    assert all(now >= then for now, then in zip(recalls(after), recalls(before), strict=True))
    assert after.precision >= before.precision
