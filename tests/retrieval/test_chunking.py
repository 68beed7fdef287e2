from hypothesis import given
from hypothesis import strategies as st

from harness1.records import DocId
from harness1.retrieval.corpus import Document, approximate_tokens, chunk

TEXTS = st.text(alphabet=st.sampled_from(list("aB1.!? \n\tÄ中")), max_size=200)


def document(text: str, doc_id: str = "d") -> Document:
    return Document(doc_id=DocId(doc_id), title="Title", text=text)


def texts(text: str, max_tokens: int) -> list[str]:
    return [piece.text for piece in chunk(document(text), max_tokens)]


def test_tokens_are_characters_by_four_rounded_up() -> None:
    assert [approximate_tokens("x" * size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]


@given(TEXTS, st.integers(1, 60))
def test_chunks_fit_and_lose_only_white_space_between_them(text: str, max_tokens: int) -> None:
    pieces = texts(text, max_tokens)
    at = 0
    for piece in pieces:
        assert approximate_tokens(piece) <= max_tokens
        found = text.index(piece, at)
        assert not text[at:found].strip()
        at = found + len(piece)
    assert not text[at:].strip()


@given(TEXTS, st.integers(1, 60))
def test_a_document_that_fits_stays_as_it_is(text: str, max_tokens: int) -> None:
    if approximate_tokens(text) <= max_tokens:
        assert texts(text, max_tokens) == [text]
    else:
        assert all(piece and piece == piece.strip() for piece in texts(text, max_tokens)) or not text.strip()


def test_a_cut_lies_at_the_last_sentence_border_that_fits() -> None:
    assert texts("One two. Three four. Five six.", 6) == ["One two. Three four.", "Five six."]
    assert texts("Is it? 7 are. Yes it is!", 4) == ["Is it? 7 are.", "Yes it is!"]
    assert texts("one two\nthree four five", 4) == ["one two", "three four five"]


def test_a_point_before_a_small_letter_is_no_border() -> None:
    assert texts("See e.g. this one. Next is here.", 5) == ["See e.g. this one.", "Next is here."]
    assert texts("It is e.g. this and that one", 4) == ["It is e.g. this", "and that one"]


def test_a_long_sentence_is_cut_at_white_space_and_a_long_word_anywhere() -> None:
    assert texts("alpha beta gamma delta", 3) == ["alpha beta", "gamma delta"]
    assert texts("ab cdefg hijk", 2) == ["ab cdefg", "hijk"]
    assert texts("x" * 10, 1) == ["xxxx", "xxxx", "xx"]


def test_the_only_chunk_has_the_id_of_its_document_and_others_are_numbered() -> None:
    assert [piece.chunk_id for piece in chunk(document("short", "X_10K#p1"), 5)] == ["X_10K#p1"]
    pieces = chunk(document("x" * 10, "X_10K#p1"), 1)
    assert [(piece.chunk_id, piece.index) for piece in pieces] == [(f"X_10K#p1#{at}", at) for at in range(3)]
    assert {(piece.doc_id, piece.title) for piece in pieces} == {("X_10K#p1", "Title")}


def test_nothing_but_white_space_is_one_empty_chunk() -> None:
    assert texts(" " * 100, 2) == [""]


def test_hostile_white_space_is_cut_quickly() -> None:
    assert texts(" " * 400_000 + "\n" * 400_000 + "end.", 2) == ["end."]
