"""Words of all scripts: what is a word, what counts as the same, and what stays as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.words import is_foreign, languages, spaced_out, stemmer, terms, words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("東京都", ["東京", "京都"]), ("猫。 犬", ["猫", "犬"]), ("서울은 수도", ["서울", "울은", "수도"])),
        *(("2024年にPython入門", ["2024", "年に", "python", "入門"]), ("ไทย", ["ไท", "ทย"]), ("ລາວ", ["ລາ", "າວ"])),
        *(("เป็นที่", ["เป็", "ป็น", "นที่"]), ("ភាសា", ["ភាសា"]), ("ဘာသာ", ["ဘာသာ"])),
        *(("हिन्दी भाषा", ["हिन्दी", "भाषा"]), ("я и Москва", ["москва"])),
    ],
)
def test_unspaced_scripts_give_pairs_and_others_give_words(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("ｶﾞﾗｽ ＡＢＣ１２", "ガラス abc12"), ("Влади́мир", "Владимир"), ("כֶּלֶב", "כלב"), ("ﻣﻜﺘﺒﺔ", "مكتبة")),
        *(("Zu\u0308rich é", "Zürich é"), ("ភា\u200bសា", "ភាសា"), ("か\u3099くせい", "がくせい")),
    ],
)
def test_forms_of_the_same_letters_are_the_same_word(one: str, other: str) -> None:
    assert words(one) == words(other) != []


def test_words_are_stemmed_by_their_script() -> None:
    assert terms("books книги книгами 東京") == ["book", "книг", "книг", "東京"]
    assert stemmer("german")("häuser") == "haus"
    assert stemmer("none")("books") == "books"
    assert {"english", "german", "russian", "arabic", "hindi", "tamil", "greek", "armenian"} <= set(languages())


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("Tokyo Tower (東京タワー) was built in 1958 – the city’s symbol.", False),
        ("東京タワーは1958年に完成した Tokyo Tower である", True),
        ("ภาษาไทย", True),
        ("Ångström “quoted” 😀🎉 𝔸𝔹 µm", False),
        ("… — 123", False),
        ("", False),
    ],
)
def test_a_text_is_foreign_if_most_of_its_letters_are(text: str, foreign: bool) -> None:
    assert is_foreign(text) == foreign


def test_a_name_without_spaces_is_found_inside_a_sentence_once_both_are_spaced_out() -> None:
    assert f" {spaced_out('東京').split()[0]} 京 " in f" {' '.join(spaced_out('今日の東京は').split())} "
    assert spaced_out("Tokyo Tower") == "Tokyo Tower"


@given(st.text(alphabet=st.characters(), max_size=200))
def test_any_text_has_words_without_white_space(text: str) -> None:
    assert all(word and not any(map(str.isspace, word)) for word in words(text))
    assert len(terms(text)) == len(words(text))


def test_a_long_run_of_accents_is_read_like_a_short_one() -> None:
    """Normalised as it stands, it would take the square of the time: many minutes."""
    assert words("ab" + "\u0316\u0301" * 200_000 + " 東京") == ["ab", "東京"]
