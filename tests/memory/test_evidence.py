"""The evidence graph equals what sorting everything anew would give, at every step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness1.memory.entities import Bridge, EvidenceGraph
from harness1.records import UnitId

_ADDITIONS = st.lists(st.tuples(st.sampled_from("pqrst"), st.lists(st.sampled_from("ABCDEF"), max_size=4)), max_size=12)


def graph(*additions: tuple[str, list[str]]) -> EvidenceGraph:
    result = EvidenceGraph()
    for unit, entities in additions:
        result.add(UnitId(unit), entities)
    return result


@given(_ADDITIONS, st.integers(0, 4))
def test_the_increments_equal_a_full_recount(additions: list[tuple[str, list[str]]], limit: int) -> None:
    built = graph(*additions)
    units: dict[str, dict[str, None]] = {}
    order: dict[str, set[str]] = {}
    for unit, entities in additions:
        order.setdefault(unit, set()).update(entities)
        for entity in entities:
            units.setdefault(entity, {})[unit] = None
    ranked = sorted((name for name in units if len(units[name]) > 1), key=lambda name: (-len(units[name]), name))
    expected = [Bridge(name, tuple(map(UnitId, units[name])), len(units[name])) for name in ranked]
    assert built.bridges(100) == expected
    assert built.bridges(limit) == expected[:limit]
    assert built.singletons == sum(len(members) == 1 for members in units.values())
    for unit, names in order.items():
        assert set(built.entities_of(UnitId(unit))) == names


def test_case_possessives_and_dots_are_one_entity_shown_as_first_seen() -> None:
    built = graph(("p", ["U.S.", "Williams"]), ("q", ["US", "williams’"]), ("r", ["WILLIAMS's"]))
    assert [(bridge.entity, bridge.total) for bridge in built.bridges(9)] == [("Williams", 3), ("U.S.", 2)]
    assert built.units_of("us") == ("p", "q")
    assert built.entities_of(UnitId("q")) == ("U.S.", "Williams")


def test_a_bridge_names_its_first_units_and_counts_all() -> None:
    built = graph(("p", ["A"]), ("q", ["A"]), ("r", ["A"]))
    assert built.bridges(1, documents=2) == [Bridge("A", (UnitId("p"), UnitId("q")), 3)]


def test_adding_again_changes_nothing() -> None:
    once, twice = graph(("p", ["A", "B"])), graph(("p", ["A", "B"]), ("p", ["B", "a"]))
    assert once == twice
    assert twice.bridges(9) == []


def test_unknown_and_empty_are_no_errors() -> None:
    built = graph(("p", ["", "'s", "."]))
    assert (built.bridges(3), built.singletons) == ([], 0)
    assert (built.entities_of(UnitId("x")), built.units_of("x")) == ((), ())
