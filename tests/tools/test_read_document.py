"""read_document: a document part by part, into the same memory as everything else."""

from __future__ import annotations

import pytest

from harness1.config import Env, Read
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import ReplayReport, replay_episode, rollout
from harness1.records import Note, Observation, Task, ToolCall, Unit
from harness1.tools.documents import first_part, take_within
from tests.support import Script, WordRetriever, call, chunk, hit, make_env, play, run, search, text_of

PARTS = [chunk("long", f"alpha{n} " + f"word{n} " * 60, "Long", n) for n in range(6)]
CHUNKS = [*PARTS, chunk("a_b_c", "alpha9 short", "Short")]


def read(handle: str, tokens: int = 250, unit: Unit = "document") -> tuple[SearchEnv, Observation, str]:
    env = make_env(Env(read=Read(tokens=tokens, by="order")), retriever=WordRetriever(CHUNKS, unit))
    step = play(env, search("alpha0 alpha9"), call("read_document", doc_id=handle))[1]
    assert step.observation is not None
    return env, step.observation, text_of(step.context)


def test_a_document_is_read_from_the_start_as_far_as_the_allowance_goes() -> None:
    env, found, text = read("D2")
    assert [part.index for part in found.hits] == [0, 1]
    assert found.notes[0] == Note("continues", {"handle": "D2.3", "parts": 4})
    assert all(part.text.strip() in text for part in found.hits)
    assert "4 more parts: read D2.3 to go on." in text
    assert [part.index for part in env.state.memory.hits_of(found.hits[0].doc_id)] == [0, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["document", "chunk"])
def test_following_the_handles_reads_the_whole_document(unit: Unit) -> None:
    env = make_env(Env(read=Read(tokens=250, by="order")), retriever=WordRetriever(CHUNKS, unit))
    handle, seen = "D2", []
    actions: list[ToolCall] = [search("alpha0 alpha9")]
    for _ in range(3):
        actions.append(call("read_document", doc_id=handle))
        found = play(env, *actions)[-1].observation
        assert found is not None
        assert found.error is None
        seen += [part.index for part in found.hits]
        handle = next((note.data["handle"] for note in found.notes if note.code == "continues"), "")
    assert (seen, handle) == ([0, 1, 2, 3, 4, 5], "")


def test_an_id_is_used_whole_however_it_is_spelled() -> None:
    _, found, _ = read("a_b_c")
    assert [part.doc_id for part in found.hits] == ["a_b_c"]
    assert found.resolved == {"a_b_c": "a_b_c"}


def test_a_part_that_does_not_exist_is_told() -> None:
    _, found, text = read("D2.9")
    assert found.hits == ()
    assert found.error == Note("no_such_part")
    assert "The document has no such part." in text


@pytest.mark.parametrize("handle", ["D7", "long#3", "", "http://x"])
def test_a_document_that_was_never_found_is_not_read(handle: str) -> None:
    _, found, _ = read(handle)
    assert found.error is not None
    assert found.error.code == "unknown_handles"


def test_what_was_read_is_not_searched_again() -> None:
    env = make_env(retriever=WordRetriever(CHUNKS))
    steps = play(env, search("alpha0"), call("read_document", doc_id="D1"), search("alpha3"))
    assert steps[2].observation is not None
    assert steps[2].observation.hits == ()


@pytest.mark.parametrize(
    ("handle", "part"), [("D12", 0), ("D12.3", 2), (" d12.1 ", 0), ("a.3", 0), ("D1.x", 0), ("D1.0", 0), ("v1.2", 0)]
)
def test_a_handle_names_its_first_part(handle: str, part: int) -> None:
    assert first_part(handle) == part


def test_parts_are_taken_whole_and_at_least_one() -> None:
    parts = [hit("a", "x" * size, index=n) for n, size in enumerate((400, 40, 40))]
    assert [part.index for part in take_within(parts, 10)] == [0]
    assert [part.index for part in take_within(parts, 110)] == [0, 1]
    assert take_within([], 10) == []


BY_EVIDENCE = Env(read=Read(tokens=250, by="evidence"))
PAGES = [
    chunk("long", f"alpha{n} " + ("Missolonghi in Greece. " if n in (3, 5, 6) else "") + f"word{n} " * 60, "Long", n)
    for n in range(9)
]
WHERE = "Is Missolonghi in Greece?"


def read_by_evidence(handle: str) -> tuple[Observation, str]:
    env = make_env(BY_EVIDENCE, retriever=WordRetriever(PAGES))
    step = play(env, search("alpha0"), call("read_document", doc_id=handle), query=WHERE)[1]
    assert step.observation is not None
    return step.observation, text_of(step.context)


def test_by_evidence_the_parts_nearest_to_the_question_are_shown_in_document_order() -> None:
    found, text = read_by_evidence("D1")
    assert [part.index for part in found.hits] == [3, 5]
    assert "[3 passages left out: read D1.1]\n[D1.4] Long\nalpha3 " in text
    assert "[1 passage left out: read D1.5]\n[D1.6] Long\nalpha5 " in text
    assert found.notes[0] == Note("continues", {"handle": "D1.7", "parts": 3})


def test_parts_that_were_left_out_are_read_by_their_handles_in_order() -> None:
    found, text = read_by_evidence("D1.1")
    assert [part.index for part in found.hits] == [0, 1]
    assert "left out" not in text
    assert [part.index for part in read_by_evidence("D1.8")[0].hits] == [7, 8]


def test_a_document_that_fits_is_read_whole_by_either_rule() -> None:
    pages = PAGES[4:7]
    small = [chunk("long", page.text[:300], "Long", n) for n, page in enumerate(pages)]
    for by in ("order", "evidence"):
        env = make_env(Env(read=Read(by=by)), retriever=WordRetriever(small))  # type: ignore[arg-type]
        step = play(env, search("alpha4"), call("read_document", doc_id="D1"), query=WHERE)[1]
        assert step.observation is not None
        assert [part.index for part in step.observation.hits] == [0, 1, 2]
        assert not [note for note in step.observation.notes if note.code == "continues"]
        assert "left out" not in text_of(step.context)


@pytest.mark.parametrize("tokens", [1, 250, 600, 5000])
@pytest.mark.parametrize("unit", ["document", "chunk"])
def test_a_reading_by_evidence_is_replayed(tokens: int, unit: Unit) -> None:
    config = Env(read=Read(tokens=tokens, by="evidence"))
    plan = Script(search("alpha0"), *(call("read_document", doc_id=handle) for handle in ("D1", "D1.2", "D1")))
    episode = run(rollout(make_env(config, retriever=WordRetriever(PAGES, unit)), plan, Task("t", WHERE)))
    assert replay_episode(episode, config) == ReplayReport(len(episode.turns), len(episode.turns))
    assert [len(seen.hits) > 0 for seen in episode.observations] == [True, True, True, True, False]


def test_the_prompt_says_so_where_a_reading_chooses() -> None:
    rules = [make_env(Env(read=Read(on=on, by="evidence"))).renderer.static.text for on in (True, False)]
    assert ["nearest to the question" in text for text in rules] == [True, False]
    assert "nearest to the question" not in make_env(Env(read=Read(by="order"))).renderer.static.text
