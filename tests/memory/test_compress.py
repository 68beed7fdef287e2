"""Compression selects what BM25Okapi would, and shows only what the text holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi

from harness1.memory.sentences import LONGEST, compress, okapi, select, split

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


def test_a_query_that_matches_nothing_selects_the_first_sentences() -> None:
    assert select(["one b", "two b", "three b"], "zebra", 2) == (0, 1)
    assert select(["", "", ""], "zebra", 2) == (0, 1)


def test_the_matching_sentence_survives_and_the_order_is_the_original() -> None:
    text = "Alpha is first. Beta is second. Gamma is third. Kites fly high. Delta is last."
    assert compress(text, "kites", 2) == "Alpha is first. Kites fly high."
    assert compress(f"  {text}\n", "kites", 5) == text
    assert compress("Alpha\nBeta", "beta", 2) == "Alpha\nBeta"


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


@given(st.text(alphabet=st.characters(), max_size=300) | st.text("aB. \n!1\ud800\x00", max_size=2000))
def test_splitting_loses_nothing_but_white_space(text: str) -> None:
    pieces = split(text)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(piece == piece.strip() and piece for piece in pieces)


def test_long_stretches_without_a_border_are_cut_at_white_space() -> None:
    pieces = split("word " * 1000)
    assert max(map(len, pieces)) <= LONGEST
    assert " ".join(pieces) == ("word " * 1000).strip()


@pytest.mark.parametrize(
    "text", ["a" * 10**6, ". " * 10**5, "a." + " " * 10**6 + "b", "\ud800\x00" * 10**5, "\n" * 10**5]
)
def test_hostile_text_takes_linear_time_and_raises_nothing(text: str) -> None:
    assert len(compress(text, "query 1", 4)) <= len(text)


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
    ],
)
def test_the_sentence_that_matters_survives_in_text_without_spaces(query: str, sentence: str) -> None:
    assert compress(JAPANESE, query, 1) == sentence


def test_other_scripts_are_compared_by_stems() -> None:
    text = "Он родился в Москве. Толстой писал книги. Потом он уехал."
    assert compress(text, "книгами", 1) == "Толстой писал книги."


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


@given(st.text("あ東。！？」. \nA한1", max_size=200))
def test_splitting_other_scripts_loses_nothing_but_white_space(text: str) -> None:
    assert "".join("".join(split(text)).split()) == "".join(text.split())
