"""Words and figures are cut as regular expressions would cut them, in every script."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from harness1.memory.question import content_terms, term_mask
from harness1.memory.sentences import runs, table, tokens

LETTERS = st.text(st.sampled_from("aB_'’-–.& \n\x1c\u00a0\u2028Σσİıé\u0301日本ñ½Ⅳ09٣\ud800"), max_size=30)


@given(LETTERS | st.text())
def test_tokens_are_the_lower_case_runs_of_word_characters(text: str) -> None:
    assert tokens(text) == re.findall(r"\w+", text.lower())


@given(LETTERS | st.text())
def test_runs_of_digits_are_those_of_the_expression(text: str) -> None:
    assert runs(text, table(str.isdigit), re.compile(r"\d+")) == re.findall(r"\d+", text)


@given(st.lists(st.lists(st.sampled_from(["directed", "film", "a", "aed", "rain"])), max_size=4))
def test_each_text_gets_the_terms_that_it_has(texts: list[list[str]]) -> None:
    terms = {term: at for at, term in enumerate(content_terms("director film aed"))}
    masks = [term_mask(" ".join(words), terms) for words in texts]
    assert masks == [
        sum({1 << terms[term] for term in content_terms(" ".join(words)) if term in terms}) for words in texts
    ]
