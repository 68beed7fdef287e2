"""Compression selects what BM25Okapi would, and shows only what the text holds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi

from harness1.memory.question import (
    by_relevance,
    content_terms,
    head,
    mentions,
    normalise_name,
    read_question,
    relatedness,
    relation_stems,
    term_mask,
)
from harness1.memory.sentences import LONGEST, compress, okapi, runs, select, split, table, tokens

_WORDS = st.sampled_from(["a", "b", "c", "d", "e", "the", "The", "THE", "of", "kite", "Kite.", "1999", "x,"])
_SENTENCES = st.lists(st.lists(_WORDS, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=12)
_QUERIES = st.lists(_WORDS, max_size=6).map(" ".join)


@given(_SENTENCES, _QUERIES, st.integers(1, 6))
def test_scores_and_picks_are_those_of_rank_bm25_to_the_last_bit(sentences: list[str], query: str, k: int) -> None:
    documents = [sentence.lower().split() for sentence in sentences]
    scores = BM25Okapi(documents).get_scores(query.lower().split()).tolist()
    assert okapi(documents, query.lower().split()) == scores
    best = sorted(range(len(sentences)), key=lambda i: (-scores[i], i))[:k]
    assert select(sentences, query, k) == tuple(sorted(best))


def test_the_matching_sentence_survives_in_the_original_order_or_else_the_first_ones() -> None:
    assert select(["one b", "two b", "three b"], "zebra", 2) == select(["", "", ""], "zebra", 2) == (0, 1)
    text = "Alpha is first. Beta is second. Gamma is third. Kites fly high. Delta is last."
    assert compress(text, "kites", 2) == "Alpha is first. Kites fly high."
    assert (compress(f"  {text}\n", "kites", 5), compress("Alpha\nBeta", "beta", 2)) == (text, "Alpha\nBeta")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Mr. Smith met Dr. Who. They left.", ("Mr. Smith met Dr. Who.", "They left.")),
        ("J. R. Ewing lives in the U.S. Army base. OK!", ("J. R. Ewing lives in the U.S. Army base.", "OK!")),
        ("Take No. 5 now. Is it? No. He left.", ("Take No. 5 now.", "Is it?", "No.", "He left.")),
        ("It fell 3.5 points. 7 rose", ("It fell 3.5 points.", "7 rose")),
        ("Été vint. Émile partit. she stayed", ("Été vint.", "Émile partit. she stayed")),
        ('He said "Go." "Why?" she asked.', ('He said "Go."', '"Why?" she asked.')),
        ("a | 1\n\n  b | 2  \n", ("a | 1", "b | 2")),
        ("", ()),
        (" \n\t ", ()),
    ],
)
def test_sentences_end_where_a_reader_would_say(text: str, sentences: tuple[str, ...]) -> None:
    assert split(text) == sentences


@given(
    st.text(alphabet=st.characters(), max_size=300)
    | st.text("aB. \n!1\ud800\x00", max_size=2000)
    | st.text("あ東。！？」. \nA한1")
)
def test_splitting_loses_nothing_but_white_space(text: str) -> None:
    pieces = split(text)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(piece == piece.strip() and piece for piece in pieces)


def test_hostile_text_takes_linear_time_and_raises_nothing() -> None:
    for text in ("a" * 10**6, ". " * 10**5, "a." + " " * 10**6 + "b", "\ud800\x00" * 10**5, "\n" * 10**5):
        assert len(compress(text, "query 1", 4)) <= len(text)
    assert max(map(len, split("word " * 1000))) <= LONGEST, "cut at white space"
    assert " ".join(split("word " * 1000)) == ("word " * 1000).strip()


JAPANESE = (
    "東京タワーは1958年に完成した。高さは333メートルである！塔を建てたのは竹中工務店。「本当か？」設計者は内藤多仲です。"
    "展望台からは富士山が見える。"
)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("設計者の名前", "設計者は内藤多仲です。"),
        ("展望台から見える山", "展望台からは富士山が見える。"),
        ("何ﾒｰﾄﾙ", "高さは333メートルである！"),
        ("книгами", "Толстой писал книги."),
    ],
)
def test_the_sentence_that_matters_survives_in_other_scripts(query: str, sentence: str) -> None:
    russian = "Он родился в Москве. Толстой писал книги. Потом он уехал."
    assert compress(russian if query == "книгами" else JAPANESE, query, 1) == sentence


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (JAPANESE[:25], ("東京タワーは1958年に完成した。", "高さは333メー")),
        ("「本当か？」と聞いた。『はい！！』", ("「本当か？」", "と聞いた。", "『はい！！』")),
        ("서울은 수도이다. 한강이 흐른다.", ("서울은 수도이다.", "한강이 흐른다.")),
        ("باريس عاصمة. هل هي جميلة؟ نعم", ("باريس عاصمة.", "هل هي جميلة؟", "نعم")),
        ("दिल्ली राजधानी है। यह बड़ी है।", ("दिल्ली राजधानी है।", "यह बड़ी है।")),
        ("Москва растёт. Река течёт. в лесу", ("Москва растёт.", "Река течёт. в лесу")),
        ("He wrote 吾輩は猫である。名前は in 1905, they say.", ("He wrote 吾輩は猫である。名前は in 1905, they say.",)),
    ],
)
def test_sentences_of_other_scripts_end_at_their_own_full_stops(text: str, sentences: tuple[str, ...]) -> None:
    assert split(text) == sentences


def test_sentences_with_signs_and_with_words_in_other_forms_are_found_as_in_an_index() -> None:
    sentences = ("Rust has traits.", "It is old.", "So are templates of C++.", "The tower (東京タワー) is tall.")
    sentences = (*sentences, "Java 2.14.3, it says.", "Rust is 2.14.4 now.", "Our o\ufb03ce is closed.")
    for query, at in {"C++": 2, "東京タワー": 3, "2.14.3": 4, "office": 6}.items():
        assert select(sentences, query, 1) == (at,)
    assert {"c++", "2.14.3"} <= {*content_terms("Is C++ older than 2.14.3?")}
    assert content_terms("our o\ufb03ce, infor\u00admation") == content_terms("our office, information")


LETTERS = st.text(st.sampled_from("aB_'’-–.& \n\x1c\u00a0\u2028Σσİıé\u0301日本ñ½Ⅳ09٣\ud800"), max_size=30)


@given(LETTERS | st.text())
def test_tokens_are_the_lower_case_runs_of_word_characters(text: str) -> None:
    assert tokens(text) == re.findall(r"\w+", text.lower())
    assert runs(text, table(str.isdigit), re.compile(r"\d+")) == re.findall(r"\d+", text)


CASTLES = "Castles were built by kings in Rome."
TEXTS = ("Rain fell for days.", "The king built a castle.", CASTLES, "More rain.", "Snow.", "Wind.")


def test_the_rarer_and_the_more_words_of_the_question_the_earlier_in_any_inflection() -> None:
    assert by_relevance(TEXTS, "Which kings built castles in Rome?") == [2, 1, 0, 3, 4, 5]
    assert by_relevance(("Of which and the.", "Snow.", "Wind.", "A castle."), "Which of the castle?") == [3, 0, 1, 2]
    assert (by_relevance(TEXTS, "zebra"), by_relevance(("", ""), "")) == ([0, 1, 2, 3, 4, 5], [0, 1])


def test_names_compare_without_accents_and_possessives_and_the_head_of_a_title_is_what_it_names() -> None:
    assert normalise_name("Pál Gábor's Café & O’Brien") == "pal gabor cafe obrien"
    assert head("The Office (U.S. TV series)") == "office"
    assert (head("Gandhi (film) - Release | Box office"), head("Gandhi (film)")) == ("gandhi film", "gandhi")


def test_a_question_mentions_names_and_both_sides_of_a_choice_and_its_relations_make_their_kin_relevant() -> None:
    asked = 'Which film whose director is younger, Forbidden Ground or Free Guy, features "a blue car"?'
    found = mentions(asked)
    assert found[0] == "a blue car"
    assert {"Forbidden Ground", "Free Guy"} <= set(found)
    assert "json.load" in mentions("what does json.load return")
    assert mentions("how do children acquire the virus") == []
    relations = relation_stems("Who is the father of the director of Jaws?")
    text = "Jaws was directed by Steven Spielberg. The premiere was crowded and Bill Clinton came."
    near, far = (relatedness(text, name, relations) for name in ("Steven Spielberg", "Bill Clinton"))
    assert near > far


def test_a_question_in_another_script_has_terms_and_names() -> None:
    asked = read_question("東京タワーの設計者は誰ですか")
    assert {"東京", "タワ", "設計"} <= asked.terms.keys()
    both = term_mask("設計者は内藤多仲", asked.terms), term_mask("東京の天気", asked.terms)
    assert both[0].bit_count() == 6 > both[1].bit_count() == 3
    assert term_mask("Tokyo Tower", asked.terms) == 0
    assert f" {head('東京タワー')} " in asked.flat
    assert f" {head('大阪')} " not in asked.flat
    assert mentions("「君の名は」の監督は誰")[0] == "君の名は"
    assert content_terms("Кто писал книги") == content_terms("кто писала книгу")
