"""What the scripted policy reads out of a question."""

from __future__ import annotations

from harness1.memory.question import (
    content_terms,
    head,
    mentions,
    normalise_name,
    read_question,
    relatedness,
    relation_stems,
    term_mask,
)


def test_names_compare_without_case_accents_punctuation_and_possessives() -> None:
    assert normalise_name("Pál Gábor's Café & O’Brien") == "pal gabor cafe obrien"


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


def test_a_question_without_spaces_has_terms_and_shares_them_with_texts() -> None:
    asked = read_question("東京タワーの設計者は誰ですか")
    assert {"東京", "タワ", "設計"} <= asked.terms.keys()
    both = term_mask("設計者は内藤多仲", asked.terms), term_mask("東京の天気", asked.terms)
    assert both[0].bit_count() == 3 > both[1].bit_count() == 1
    assert term_mask("Tokyo Tower", asked.terms) == 0


def test_a_name_in_a_sentence_without_spaces_is_recognised() -> None:
    assert f" {head('東京タワー')} " in read_question("東京タワーの設計者は誰").flat
    assert f" {head('大阪')} " not in read_question("東京タワーの設計者は誰").flat
    assert mentions("「君の名は」の監督は誰")[0] == "君の名は"


def test_questions_in_other_scripts_are_stemmed_by_them() -> None:
    assert content_terms("Кто писал книги") == content_terms("кто писала книгу")
