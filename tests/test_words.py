"""Words of all scripts: what is a word, what counts as the same, and what stays as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.words import LONGEST, humps, is_foreign, languages, signed, spaced_out, stemmer, terms, words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("東京都", ["東京", "京都", "東", "京", "都"]), ("猫。 犬", ["猫", "犬"]), ("서울", ["서울", "서", "울"])),
        *(
            ("2024年にPython入門", ["2024", "年に", "年", "python", "入門", "入", "門"]),
            ("ไทย", ["ไท", "ทย"]),
            ("ລາວ", ["ລາ", "າວ"]),
        ),
        *(("เป็นที่", ["เป็", "ป็น", "นที่"]), ("ភាសា", ["ភាសា"]), ("ဘာသာ", ["ဘာသာ"])),
        *(("हिन्दी भाषा", ["हिन्दी", "भाषा"]), ("я и Москва à", ["я", "и", "москва", "à"])),
    ],
)
def test_unspaced_scripts_give_pairs_and_others_give_words(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("C++, (C#) f# C++11 a+b", "c++ c# f# c++ 11"),
        (
            "the .NET of ASP.NET, and so on...And (node.js).",
            "the .net net of asp.net asp net and so on and node.js node js",
        ),
        ("snake_case __init__ __ _", "snake_case snake case __init__ init"),
        ("camelCase HTTPServer IPs", "camelcase httpserver ips"),
        ("x86-64 ORA-00942 E0499 0x80070005", "x86-64 x86 64 ora-00942 ora 00942 e0499 0x80070005"),
        ("(v2.14.3-rc1), 2.14.3.", "v2.14.3-rc1 2.14 2.14.3 v2 14 rc1 2.14.3 2.14 14"),
        ("U.S. and x-ray of IL-6 in 3.5 a b 7 Covid-19", "u.s and x-ray ray of il-6 il in 3.5 covid 19"),
        ("well-known Jean-Pierre's don't \"Why?\" [1998]", "well known jean pierre don why 1998"),
        (
            "photo-\nsynthesis, in\u00ad \r\n formed 1990-\n1995",
            "photo synthesis photosynthesis in formed informed 1990 1995",
        ),
    ],
)
def test_what_is_written_together_is_a_word_with_its_parts(text: str, found: str) -> None:
    assert words(text) == found.split()


def test_capitals_mark_the_words_within_a_word() -> None:
    found = {"getUserName": "get user name", "HTTPServer": "http server", "my_parseURL(": "parse url", "Ｔｅｃｈ": ""}
    for piece, inside in (found | dict.fromkeys(("iPhone", "IPs", "mRNA", "Word", "SARS-CoV-2"), "")).items():
        assert humps(piece) == inside.split()


def test_what_is_written_together_at_great_length_has_only_parts() -> None:
    assert words(".".join(["ab"] * LONGEST)) == ["ab"] * LONGEST
    assert len(words("1." * 100_000)) == 0


def test_only_signs_that_letters_do_not_tell_are_signed() -> None:
    assert signed("C++ and C#, .NET 4.8.1 on x86-64 in the U.S. by snake_case, e.g. node.js") == [
        "c++",
        "c#",
        ".net",
        "4.8.1",
        "4.8",
    ]
    assert signed("One sentence. Another one - of the U.S.") == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("ｶﾞﾗｽ ＡＢＣ１２", "ガラス abc12"), ("Влади́мир", "Владимир"), ("כֶּלֶב", "כלב"), ("ﻣﻜﺘﺒﺔ", "مكتبة")),
        *(
            ("Zu\u0308rich é", "Zürich é"),
            ("ភា\u200bសា", "ភាសា"),
            ("か\u3099くせい", "がくせい"),
            ("葛\U000e0100城 İzmir", "葛城 izmir"),
            ("IL\u20116", "il-6"),
        ),
    ],
)
def test_forms_of_the_same_letters_are_the_same_word(one: str, other: str) -> None:
    assert words(one) == words(other) != []


def test_words_are_stemmed_by_their_script() -> None:
    assert terms("books книги книгами 東京") == ["book", "книг", "книг", "東京", "東", "京"]
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
    assert words("ab" + "\u0316\u0301" * 200_000 + " 東京") == ["ab", "東京", "東", "京"]
