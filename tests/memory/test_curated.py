"""The curated set: capped, ordered by importance, and edited by one rule for each eviction policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Curation
from harness1.memory.parts import RANK, CuratedSet
from harness1.records import TAGS, Tag, UnitId

A, B, C, D = map(UnitId, "abcd")
_TAG = st.sampled_from(TAGS)
_UNIT = st.sampled_from([UnitId(letter) for letter in "abcdefgh"])
_EDITS = st.lists(st.tuples(st.dictionaries(_UNIT, _TAG, max_size=6), st.lists(_UNIT, max_size=3)), max_size=10)
_SETTINGS = st.builds(
    Curation, cap=st.integers(1, 5), tags=st.just(True), eviction=st.sampled_from(["rank", "fifo", "refuse"])
)


def curated(**tags: Tag) -> CuratedSet:
    return CuratedSet({UnitId(name): tag for name, tag in tags.items()})


@given(_EDITS, _SETTINGS)
def test_the_cap_holds_and_every_change_is_reported(edits: list[Any], settings: Curation) -> None:
    kept = CuratedSet()
    for additions, removals in edits:
        before = dict(kept.tags)
        change = kept.edit(additions, removals, settings)
        assert len(kept) <= settings.cap
        gone = {*change.removed, *change.evicted} - change.added.keys()
        assert set(kept.tags) == (before.keys() | change.added.keys()) - gone
        assert not set(change.refused) & kept.tags.keys()
        assert all(kept.tags[unit] == tag for unit, tag in {**change.added, **change.retagged}.items() if unit in kept)
        ranks = [RANK[entry.tag] for entry in kept.in_order()]
        assert ranks == sorted(ranks)
        assert [entry.rank for entry in kept.in_order()] == list(range(1, len(kept) + 1))


@given(st.dictionaries(_UNIT, _TAG, max_size=8), _SETTINGS)
def test_adding_the_same_again_changes_nothing(additions: dict[UnitId, Tag], settings: Curation) -> None:
    kept = CuratedSet()
    kept.edit(additions, [], settings)
    before = list(kept.tags.items())
    again = {unit: tag for unit, tag in additions.items() if unit in kept}
    change = kept.edit(again, [], settings)
    assert list(kept.tags.items()) == before
    assert not any((change.added, change.retagged, change.evicted, change.refused))


def test_adding_what_is_there_only_changes_its_tag_and_keeps_its_place() -> None:
    kept = curated(a="fair", b="fair")
    change = kept.edit({A: "high"}, [], Curation())
    assert (change.added, change.retagged) == ({}, {A: "high"})
    assert list(kept.tags) == [A, B]


def test_delivery_is_by_importance_then_by_addition() -> None:
    kept = curated(a="low", b="very_high", c="fair", d="very_high")
    assert [entry.unit_id for entry in kept.in_order()] == [B, D, C, A]


def test_removals_come_before_additions() -> None:
    kept = curated(a="high", b="high")
    change = kept.edit({C: "low"}, [A], Curation(cap=2))
    assert list(kept.tags) == [B, C]
    assert (change.removed, change.refused) == ([A], [])


@pytest.mark.parametrize(
    ("eviction", "incoming", "left"),
    [
        ("rank", "high", [A, C]),  # b is the first of the least important
        ("rank", "low", [A, B]),  # equal importance does not evict
        ("fifo", "low", [B, C]),
        ("refuse", "very_high", [A, B]),
    ],
)
def test_at_the_cap_the_eviction_policy_decides(eviction: Any, incoming: Tag, left: list[UnitId]) -> None:
    kept = curated(a="fair", b="low")
    change = kept.edit({C: incoming}, [], Curation(cap=2, eviction=eviction))
    assert list(kept.tags) == left
    assert (change.refused == [C]) == (C not in left)


def test_the_first_of_the_least_important_is_evicted() -> None:
    kept = curated(a="low", b="low")
    assert kept.edit({C: "fair"}, [], Curation(cap=2)).evicted == [A]


def test_one_added_and_evicted_in_the_same_call_counts_as_refused() -> None:
    kept = curated(a="high")
    change = kept.edit({B: "low", C: "high"}, [], Curation(cap=2))
    assert (change.added, change.evicted, change.refused) == ({C: "high"}, [], [B])
