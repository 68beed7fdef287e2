"""What the scripted policy reads out of a question."""

from __future__ import annotations

from harness1.memory.question import head, mentions, normalised_name, relatedness, relation_stems


def test_names_compare_without_case_accents_punctuation_and_possessives() -> None:
    assert normalised_name("Pál Gábor's Café & O’Brien") == "pal gabor cafe obrien"


def test_the_head_of_a_title_is_what_it_names() -> None:
    assert head("The Office (U.S. TV series)") == "office"
    assert head("Gandhi (film) - Release | Box office") == "gandhi film"
    assert head("Gandhi (film)") == "gandhi"


def test_a_question_mentions_quotations_names_and_both_sides_of_a_comparison() -> None:
    asked = 'Which film whose director is younger, Forbidden Ground or Free Guy, features "a blue car"?'
    found = mentions(asked)
    assert found[0] == "a blue car"
    assert {"Forbidden Ground", "Free Guy"} <= set(found)


def test_a_dotted_name_is_a_mention() -> None:
    assert "json.load" in mentions("what does json.load return")


def test_a_question_without_names_mentions_nothing() -> None:
    assert mentions("how do children acquire the virus") == []


def test_a_relation_word_makes_its_kin_relevant() -> None:
    relations = relation_stems("Who is the father of the director of Jaws?")
    text = "Jaws was directed by Steven Spielberg. The premiere was crowded and Bill Clinton came."
    assert relatedness(text, "Steven Spielberg", relations) > relatedness(text, "Bill Clinton", relations)
