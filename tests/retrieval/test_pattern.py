from __future__ import annotations

import re2
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.retrieval.pattern import ANYTHING, All, Query, Some, analyse, find_literal, fold, trigrams

LETTERS = "abkKsS.-é\u212a\u017f\n"

LITERALS = [*"abkKsS-é\u212a\u017f", "abk", "sak", r"\.", r"\n", r"\x61", r"\x{6b}", r"\Qa.s\E", r"\Q\E", "É"]

ATOMS = [*LITERALS, ".", "[ab]", "[kS]", "[^a]", "[a-k]", r"[\w-]", "[[:upper:]]", r"\w", r"\pL", "^", "$", r"\b", "()"]

REPEATS = ["*", "+", "?", "*?", "+?", "??", "{0}", "{2}", "{3}", "{0,2}", "{1,}", "{1,2}", "{2,3}?"]


def patterns() -> st.SearchStrategy[str]:
    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        opens = st.sampled_from(["(", "(?:", "(?i:", "(?-i:", "(?P<name>", "(?i)(", "((?i)", "(?s-i:"])
        return st.one_of(
            st.lists(inner, min_size=1, max_size=4).map("".join),
            st.lists(inner, min_size=2, max_size=3).map("|".join),
            st.builds(lambda head, body, tail: f"{head}{body}){tail}", opens, inner, st.sampled_from(["", *REPEATS])),
            st.builds(str.__add__, st.sampled_from(ATOMS), st.sampled_from(REPEATS)),
        )

    return st.recursive(st.sampled_from(ATOMS), grow, max_leaves=12)


def compiled(pattern: str):
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


def satisfies(text: str, query: Query) -> bool:
    if isinstance(query, int):
        return query.to_bytes(3, "big") in fold(text)
    return (all if isinstance(query, All) else any)(satisfies(text, each) for each in query.of)


def words(*texts: str) -> Query:
    """Some of the texts, with all their trigrams."""
    return trigrams(texts[0]) if len(texts) == 1 else Some(tuple(map(trigrams, texts)))


@settings(max_examples=250, deadline=None)
@given(patterns(), st.lists(st.text(LETTERS, max_size=9), min_size=5, max_size=20))
def test_every_match_satisfies_what_was_read_off_its_pattern(pattern: str, texts: list[str]) -> None:
    if (regexp := compiled(pattern)) is None:
        return
    analysis = analyse(pattern)
    for text in texts:
        if regexp.search(text):
            assert satisfies(text, analysis.query)
            assert analysis.needle is None or compiled(analysis.needle).search(text)
        elif analysis.needle == pattern:
            assert not compiled(analysis.needle).search(text)


def test_literals_groups_and_alternatives_are_looked_into() -> None:
    kept = {
        "kelvin": ["kelvin"],
        r"\bKelvin\b$": ["kelvin"],
        r"a\.b\x63\x{64}\t": ["a.bcd\t"],
        r"\Qa.b*\Ec+": ["a.b*c"],
        "colou?r": ["color", "colour"],
        "(?:foo|ba[rz])!": ["bar!", "baz!", "foo!"],
        "(abc){2}": ["abcabc"],
        "x{0}abc": ["abc"],
        "a{3,}": ["aaa"],
        "(?P<city>Paris)": ["paris"],
        "Zürich": ["zürich"],
        "abc{": ["abc{"],
        "abc{,2}": ["abc{,2}"],
        "(foo.*|b+ard)x": ["foo", "ard"],
    }
    for pattern, texts in kept.items():
        assert analyse(pattern).query == words(*texts), pattern
    assert analyse("born.{1,50}Paris").query == All((*words("born").of, *words("paris").of))


def test_what_may_be_absent_or_is_not_understood_counts_as_anything() -> None:
    absent = ("(abc)?", "(abc)*", "(abc){0,3}", "abc|", "abc|d", "[abcde][fghij][klmno]", ".*", "a.b.c", r"\d{9}")
    odd = (r"abc\Cdef", r"abc\1", r"abc\07", "(?=abc)", "abc(?i)*", f"{'(' * 60}abc{')' * 60}", "ab\\", r"abc\x{D800}")
    for pattern in (*absent, *odd):
        assert analyse(pattern).query == ANYTHING, pattern
        assert analyse(pattern).needle is None or pattern in absent


def test_case_is_ignored_where_re2_ignores_it() -> None:
    beyond = "".join(map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x110000)]))
    assert set(re2.findall("(?i)[a-z]", beyond)) == {"\u212a", "\u017f"}
    assert fold("K\u212aS\u017fÄ") == "kkssÄ".encode()
    assert analyse("(?i)KELVIN'S").query == analyse("kelvin's").query == analyse("\u212aelvin'\u017f").query
    assert analyse("(?i)Ärger").query == words("rger")
    assert analyse("(?i:Ä)(?i)rger(?-i)Ä").query == words("rgerÄ")
    assert analyse("(?i)[ä]rger").query == words("rger")


def test_the_needle_is_the_longest_literal_and_a_plain_pattern_is_its_own() -> None:
    assert analyse(r"born.{1,50}Helsin(k|g)i").needle == "Helsingi|Helsinki"
    assert analyse("(?i)a.b+(kelvin)").needle == "(?i)kelvin"
    assert analyse("(?i)Mr. Kelvin.").needle == "(?i) Kelvin"
    assert analyse("ab.cd").needle is None
    for pattern in ("Kelvin", "(?i)lord Kelvin, 1892", "Zürich"):
        assert analyse(pattern).needle == pattern
    for pattern in (r"\bKelvin", "^Kelvin", "(?i)Kelvin(?-i)x", "Kelvin+"):
        assert analyse(pattern).needle != pattern


def test_choices_are_counted_before_and_after_the_first_literal() -> None:
    assert analyse("[a-m].{20}x")[1:3] == (21, 0)
    assert analyse("born.{1,50}Paris")[1:3] == (0, 50)
    assert analyse("(born|died)[a-z]{9}(x|yz)")[1:3] == (1, 2 * 10)
    assert analyse(r"(\w?){500}\w{500}").free == 1000
    assert analyse(r"a\C").free >= 1000


def test_long_and_nested_repeats_are_read_at_once() -> None:
    for pattern in ("((a{100}){10}){1}", "(a?){500}a{500}", "(" * 40 + "abcd" + "){2}" * 9 + ")" * 31, "(a|b)" * 190):
        analyse(pattern)
    assert analyse("(((((ab[cd]){3}){3}){3}){3}){3}").query != ANYTHING


def test_a_literal_is_taken_where_it_is_safe() -> None:
    literals = {
        "river bank": "river bank",
        r"\bBoum.{0,40}19\d\ds": "Boum",
        r"a\.b\-c": "a.b-c",
        "colou?r scheme": "r scheme",
        "(foo|bar)bazz": "bazz",
        r"[]abc]def[[:alpha:]\]x]g": "def",
        '50% "more" now': "more",
        "foo|barbaz": "",
        "(?i)river": "",
        "river(?i:bank)": "",
        r"\p{Greek}abc": "abc",
        "line\nbreak": "break",
        r"abc\1": "",
    }
    assert {pattern: find_literal(pattern) for pattern in literals} == literals


@given(st.text(alphabet="ab.|()[]{}*+?^$\\,-12:", max_size=14), st.text(alphabet="ab.()[]{}*,-12:", max_size=20))
def test_no_match_lacks_the_literal(pattern: str, text: str) -> None:
    regexp = compiled(pattern)
    if regexp is not None and regexp.search(text):
        assert find_literal(pattern) in text
