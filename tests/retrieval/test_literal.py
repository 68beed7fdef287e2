import re

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from harness1.retrieval.pattern import required_literal


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        ("river bank", "river bank"),
        (r"\bBoum.{0,40}19\d\ds", "Boum"),
        (r"a\.b\-c", "a.b-c"),
        ("colou?r scheme", "r scheme"),
        ("ab*cd{2}e", "cdde"),
        ("(foo|bar)bazz", "bazz"),
        ("(?:x[)]y|z)ab", "ab"),
        (r"[]abc]def[[:alpha:]\]x]g", "def"),
        ('50% "more" now', "more"),
        ("", ""),
        ("foo|barbaz", ""),
        ("(?i)river", ""),
        ("river(?i:bank)", ""),
        (r"\Qa.b\E", "a.b"),
        (r"\x41bc", "Abc"),
        (r"\p{Greek}abc", "abc"),
        ("a{,3}bcd", "a{,3}bcd"),
        ("line\nbreak", "break"),
        ("東京タワー?", "東京タワ"),
    ],
)
def test_a_literal_is_taken_where_it_is_safe(pattern: str, literal: str) -> None:
    assert required_literal(pattern) == literal


@given(st.text(alphabet="ab.|()[]{}*+?^$\\,-12:", max_size=14), st.text(alphabet="ab.()[]{}*,-12:", max_size=20))
def test_no_match_lacks_the_literal(pattern: str, text: str) -> None:
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error:
        return
    if compiled.search(text):
        assert required_literal(pattern) in text


@given(st.text(max_size=30))
def test_an_escaped_text_is_found_by_a_part_of_itself(text: str) -> None:
    assert required_literal(re.escape(text)) in text
