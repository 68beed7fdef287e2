"""The view is exactly what the kept pieces show, and of several showings the last one holds."""

from __future__ import annotations

import pytest

from harness1.config import Env, Rendering
from harness1.env.pieces import piece
from harness1.env.view import CuratedSetView, CuratedView, DocumentView, HitView, View
from harness1.records import UnitId
from tests.support import call, curate, make_env, play, search, text_of, wide_corpus

A = UnitId("a")


def test_the_last_showing_of_a_thing_holds() -> None:
    first, last = (CuratedSetView((CuratedView("D1", A, tag),), 30) for tag in ("fair", "high"))  # type: ignore[arg-type]
    view = View.of([piece("curated", "user", "x", first), piece("curated", "user", "y", last), piece("z", "user", "z")])
    assert view.curated == last.entries
    assert view.cap == 30


def test_of_a_document_the_longest_text_is_kept() -> None:
    texts = ["short", "the longest text", "medium one"]
    shown = [HitView(1, DocumentView("D1", A, "T", text)) for text in texts]
    view = View.of([piece("hit", "tool", "x", each) for each in shown])
    assert view.documents["D1"].text == "the longest text"
    assert [hit.document.text for hit in view.hits[1]] == texts


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch"])
def test_everything_in_the_view_can_be_read_in_the_text(order: str) -> None:
    env = make_env(Env(rendering=Rendering(order)), wide_corpus(30))  # type: ignore[arg-type]
    actions = (
        search("river castle"),
        curate(add_ids=["D1"], importance={"D1": "very_high"}),
        call("verify", doc_ids=["D1"], claim="The castle stands by the river."),
        call("read_document", doc_id="D2"),
        search("Paris"),
        search("engine"),
        search("poet"),
    )
    for step in play(env, *actions):
        assert step.context is not None
        view, text = step.context.view, text_of(step.context)
        assert view.query in text
        assert f"Budget: {view.budget.used} of {view.budget.limit}" in text
        assert all(document.text in text and document.handle in text for document in view.documents.values())
        assert all(entry.handle in text and entry.tag in text for entry in view.curated)
        assert all(f"{seen.handle} {seen.label}: {seen.claim}" in text for seen in view.verdicts)
        assert all(bridge.entity in text for bridge in view.bridges.bridges)
        assert all(f"Turn {turn}: " in text for turn in view.turns)
        assert all(f"T{line.turn} {line.tool}" in text for line in view.history.lines)
        assert f"Pool: {view.pool.total} documents" in text


def test_a_dropped_piece_is_not_in_the_view() -> None:
    env = make_env(Env(context_window=3000, generation_reserve=300), wide_corpus(40))
    context = play(env, *map(search, ("river", "war", "king", "Rome", "rain")))[-1].context
    assert context is not None
    assert context.budget.dropped > 0
    assert len(context.view.documents) < len(env.state.memory.pool.entries)
    assert all(document.text in text_of(context) for document in context.view.documents.values())
