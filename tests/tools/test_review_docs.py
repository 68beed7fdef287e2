"""review_docs: what the memory holds, in full, without a search."""

from __future__ import annotations

import pytest

from harness1.config import Env, Review
from harness1.records import Note, Observation
from tests.support import CORPUS, WordRetriever, call, chunk, make_env, play, search, text_of


def review(*handles: str, env: Env | None = None) -> tuple[Observation, str]:
    step = play(make_env(env), search("Ada Byron"), call("review_docs", doc_ids=list(handles)))[1]
    assert step.observation is not None
    return step.observation, text_of(step.context)


def test_the_full_text_is_shown_and_nothing_is_asked() -> None:
    retriever = WordRetriever([chunk("a", " ".join(f"Sentence {n} is here." for n in range(30)))])
    env = make_env(retriever=retriever)
    step = play(env, search("Sentence"), call("review_docs", doc_ids=["D1"]))[1]
    assert retriever.calls == 1
    assert retriever.chunks[0].text in text_of(step.context)
    assert step.observation is not None
    assert step.observation.delta.new == ()


def test_unknown_handles_are_told_beside_those_that_are_known() -> None:
    found, text = review("D1", "D9", "byron")
    assert [hit.doc_id for hit in found.hits] == ["ada", "byron"]
    assert found.resolved == {"D1": "ada", "byron": "byron"}
    assert "Unknown: D9 (1)." in text
    assert CORPUS[1].text in text


def test_naming_nothing_or_nothing_known_is_an_error() -> None:
    assert review()[0].error == Note("no_handles")
    error = review("x", "y")[0].error
    assert error is not None
    assert error.code == "unknown_handles"


def test_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Review, "documents", 2)
    found, _ = review("D1", "D2", "D3")
    assert len(found.hits) == 2
    assert Note("documents_left_out", {"count": 1, "limit": 2}) in found.notes
    monkeypatch.setattr(Review, "tokens", 20)
    found, _ = review("D1", "D2")
    assert len(found.hits) == 1
    assert Note("parts_left_out", {"count": 1}) in found.notes


def test_the_same_document_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Review, "documents", 2)
    found, _ = review("D1", "d1", "ada", "D2")
    assert [hit.doc_id for hit in found.hits] == ["ada", "babbage"]
