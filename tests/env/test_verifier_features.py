"""What the features of a claim and a text see: coverage, numbers, denials and opposites."""

from __future__ import annotations

import pytest

from harness1.env.verifiers.features import Features, compare, nearest, read, split_subject

CLAIM = "Zinc increases the growth of maize."


def features(claim: str, text: str) -> Features:
    subject, rest = split_subject(text)
    sentences = [read(each) for each in rest]
    read_claim = read(claim)
    return compare(read_claim, read(subject), sentences, nearest(read_claim, sentences))


@pytest.mark.parametrize(
    ("text", "opposed", "agreed", "stance"),
    [
        ("Metals\nZinc increased maize growth.", 0, 1, 1),
        ("Metals\nZinc reduced maize growth.", 1, 0, -1),
        ("Metals\nZinc did not increase maize growth.", 0, 1, -1),
        ("Metals\nZinc never reduced maize growth.", 1, 0, 1),
        ("Metals\nZinc is in maize.", 0, 0, 0),
    ],
)
def test_opposites_take_sides_and_a_denial_before_them_changes_the_side(
    text: str, opposed: int, agreed: int, stance: int
) -> None:
    # "grow" stands for a rise as "increase" does, so the pair is asked about twice and counts once.
    found = features(CLAIM, text)
    assert (found.opposed, found.agreed) == (opposed, agreed)
    assert (found.best_stance > 0) - (found.best_stance < 0) == stance
    assert (found.stance > 0) - (found.stance < 0) == stance


def test_the_subject_stands_for_pronouns() -> None:
    found = features("Ada Lovelace wrote programs.", "Ada Lovelace - Life\nShe wrote programs. It rained.")
    assert found.best_and_subject_cover == found.text_cover == found.prefixes == 1.0
    assert found.best_cover < 1.0
    assert found.names_missing == found.missing == 0
    bare = features("Ada Lovelace wrote programs.", "Poets\nShe wrote programs. It rained.")
    assert bare.names_missing == bare.names_missing_in_text == 1.0
    assert bare.missing == 2


def test_numbers_are_equal_missing_or_rivals_of_their_kind() -> None:
    equal = features("He won in 1903.", "Prizes\nHe won in 1903.")
    assert (equal.numbers, equal.numbers_equal, equal.numbers_missing, equal.number_rival) == (1, 1, 0, 0)
    rival = features("He won in 1903.", "Prizes\nHe won in 1911. He died in 1903.")
    assert (rival.numbers_equal, rival.numbers_missing_in_text) == (1, 0) or rival.number_rival == 1
    other = features("He won in 1903.", "Prizes\nHe won in 1911.")
    assert (other.numbers_missing, other.numbers_missing_in_text, other.number_rival, other.numbers_new) == (1, 1, 1, 1)
    kind = features("He won in 1903.", "Prizes\nHe won 20% of it.")
    assert (kind.numbers_missing, kind.number_rival) == (1, 0)


def test_denials_are_compared() -> None:
    def denials(claim: str, text: str) -> tuple[float, float, float, float]:
        found = features(claim, text)
        return found.claim_denies, found.best_denies, found.both_deny, round(found.parity, 3)

    assert denials("Zinc is not toxic.", "Metals\nZinc is a metal.") == (1, 0, 0, -1)
    assert denials("Zinc is a metal.", "Metals\nZinc isn't a metal.") == (0, 1, 0, -1)
    assert denials("Zinc is not a metal.", "Metals\nZinc is no metal.") == (0, 0, 1, 1)
    assert denials("Zinc is a metal.", "Metals\nZinc is a metal.") == (0, 0, 0, 1)


@pytest.mark.parametrize("text", ["", "\n", "?", "7", "a", "Word", "é" * 5000])
@pytest.mark.parametrize("claim", ["?", "Zinc is a metal.", "7 of 9"])
def test_every_text_has_finite_features(claim: str, text: str) -> None:
    found = features(claim, text)
    assert all(-40 <= getattr(found, name) <= 40 for name in Features.__struct_fields__)


def test_sentences_that_cover_more_come_first_and_short_ones_if_equal() -> None:
    sentences = [
        read(each) for each in ("It rained.", "Zinc and maize were there.", "Zinc, maize.", "Growth of maize.")
    ]
    assert nearest(read(CLAIM), sentences)[-1] == 0
    assert nearest(read("Zinc and maize"), sentences)[:2] == [2, 1]
