"""Entities are names as a reader sees them, without the capitals that grammar makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.memory.entities import extract


def found(text: str) -> tuple[str, ...]:
    return extract(text, 8000)


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        ("met IBM, NASA and U.S. Army staff", ("IBM", "NASA", "U.S. Army")),
        ("by McDonald, iPhone, eBay, mRNA and DeepMind", ("McDonald", "iPhone", "eBay", "mRNA", "DeepMind")),
        ("with Jean-Paul Sartre and Coca-Cola", ("Jean-Paul Sartre", "Coca-Cola")),
        ("saw O'Brien’s car and Apple's shop", ("O'Brien", "Apple")),
        ("of Élodie Šimek from Žilina", ("Élodie Šimek", "Žilina")),
        ("by Ludwig van Beethoven, Osama bin Laden", ("Ludwig van Beethoven", "Osama bin Laden")),
        ("read Lord of the Rings at University of California", ("Lord of the Rings", "University of California")),
        ("J. R. R. Tolkien met George W. Bush", ("J. R. R. Tolkien", "George W. Bush")),
        ("saw Apollo 11 after World War II", ("Apollo 11", "World War II")),
        ("in 1969, the 1990s and 12/03/2020", ("1969", "1990s", "12/03/2020")),
        ("at AT&T, Tom & Jerry and 3M", ("AT&T", "Tom & Jerry", "3M")),
        ("that Bashar al-Assad and Jeanne d'Arc", ("Bashar al-Assad", "Jeanne d'Arc")),
        ("lives in St. Louis with Mr. Smith", ("St. Louis", "Smith")),
    ],
)
def test_names_of_every_shape_are_whole(text: str, entities: tuple[str, ...]) -> None:
    assert found(text) == entities


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        ("However Apple grew. The United States did. In The Hague too.", ("Apple", "United States", "Hague")),
        ("It is so. Don't go. I'm here. They're late. It's fine.", ()),
        ("On Monday, March 12, he left. In May 2020 too.", ("2020",)),
        ("Section 3 and Table 4 in Part II.", ()),
        ("made in the U.S. The firm grew; vitamin C. However, no.", ("U.S.",)),
        ("priced 3.1415 or 1,2345 or 12345", ()),
        ("US staff left. WHO met. Who knows? Us.", ("US", "WHO")),
    ],
)
def test_what_grammar_capitalises_is_no_name(text: str, entities: tuple[str, ...]) -> None:
    assert found(text) == entities


def test_a_common_word_that_starts_a_sentence_needs_support_from_inside_one() -> None:
    assert found("Scientists left. Company men came.") == ()
    assert found("Company men came to the Company.") == ("Company",)
    assert found("to the Company. Company men came.") == ("Company",)
    assert found("Casablanca is old.") == ("Casablanca",)


def test_entities_are_unique_in_order_of_appearance_and_the_limit_counts() -> None:
    assert found("to Rome, Paris, Rome") == ("Rome", "Paris")
    assert extract("to Rome, Paris", 8) == ("Rome",)


def test_names_do_not_reach_over_lines() -> None:
    assert found("to Rome\nParis") == ("Rome", "Paris")


@given(st.text(st.characters(), max_size=300) | st.text("AaB. '-&1/of\ud800\x00É", max_size=500))
def test_every_entity_stands_in_the_text(text: str) -> None:
    entities = found(text)
    assert len(set(entities)) == len(entities)
    assert all(len(entity) >= 2 and entity in text for entity in entities)


@pytest.mark.parametrize(
    "text", ["A" * 10**6, "A. " * 10**5, "Aa of the " * 10**5, "A-" * 10**5, "\ud800\x00" * 10**5, ""]
)
def test_hostile_text_takes_linear_time_and_raises_nothing(text: str) -> None:
    assert all(len(entity) <= 100 for entity in extract(text, 10**6))
