from __future__ import annotations

import pytest

from harness1.viewer.tables import Passage, slice_text
from tests.viewer.making import joined

ADA = Passage(
    "ada#0", "ada", "Ada Lovelace, countess", "Ada wrote the first program. It was for an engine. Byron was near."
)
MORE = Passage("ada#1", "ada", "Ada Lovelace, countess", "She died in London, far too young.")
SOURCES = [(7, ADA), (9, MORE)]
ALL = dict(SOURCES)


def together(parts: object) -> str:
    passages = [ALL.get(number, ADA) for number in range(10)]
    return joined(parts, passages)  # type: ignore[arg-type]


def test_a_piece_that_quotes_a_passage_stores_only_what_it_adds() -> None:
    text = (
        "[D1] Ada Lovelace, countess q1#2\nAda wrote the first program. It was for an engine. She died in London, far\n"
    )
    parts = slice_text(text, SOURCES)
    assert [part for part in parts if isinstance(part, str)] == ["[D1] ", " q1#2\n", "\n"]
    assert parts[1:4] == [7, 0, len(ADA.title)]
    assert len([part for part in parts if isinstance(part, int)]) == 9
    assert together(parts) == text


@pytest.mark.parametrize("text", ["", "\n", "Nothing of this is quoted from anywhere.\n", "Ada wrote\n"])
def test_a_text_that_quotes_nothing_stays_as_it_is(text: str) -> None:
    assert slice_text(text, SOURCES) == text
    assert slice_text(text, ()) == text


def test_characters_that_a_page_counts_twice_are_not_referred_to() -> None:
    odd = Passage("odd", "odd", "", "\U0001d11e The clef comes before all notes.")
    assert slice_text("The clef comes before all notes.\n", [(0, odd)]) == "The clef comes before all notes.\n"
