"""read_document: a document part by part, into the same memory as everything else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from harness1.config import AutoPopulate, Curation, Env, Read
from harness1.env.environment import SearchEnv
from harness1.env.verifiers import Judgement, VerifierFault
from harness1.episodes.rollout import ReplayReport, replay_episode, rollout
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Chunk, Note, Observation, StopReason, Task, ToolCall, Unit, UnitId
from harness1.tools.discovery import take_within
from harness1.tools.documents import first_part
from tests.support import (
    CORPUS,
    END,
    Script,
    WordRetriever,
    call,
    chunk,
    curate,
    hit,
    make_env,
    play,
    run,
    search,
    text_of,
)

PARTS = [chunk("long", f"alpha{n} " + f"word{n} " * 60, "Long", n) for n in range(6)]

CHUNKS = [*PARTS, chunk("a_b_c", "alpha9 short", "Short")]


def read(
    handle: str, by: str = "order", chunks: Sequence[Chunk] = CHUNKS, query: str = "q"
) -> tuple[SearchEnv, Observation, str]:
    env = make_env(Env(read=Read(tokens=250, by=by)), retriever=WordRetriever(chunks))
    step = play(env, search("alpha0 alpha9"), call("read_document", doc_id=handle), query=query)[1]
    return env, step.observation, text_of(step.context)


def test_a_document_is_read_from_the_start_as_far_as_the_allowance_goes() -> None:
    env, found, text = read("D2")
    assert [part.index for part in found.hits] == [0, 1]
    assert found.notes[0] == Note("continues", {"handle": "D2.3", "parts": 4})
    assert all(part.text.strip() in text for part in found.hits)
    assert "4 more parts: read D2.3 to go on." in text
    assert [part.index for part in env.state.memory.hits_of(found.hits[0].doc_id)] == [0, 1]


@pytest.mark.parametrize("unit", ["document", "chunk"])
def test_following_the_handles_reads_the_whole_document_which_is_not_searched_again(unit: Unit) -> None:
    env = make_env(Env(read=Read(tokens=250, by="order")), retriever=WordRetriever(CHUNKS, unit))
    run(env.reset(Task("t", "q")))
    run(env.step([search("alpha0 alpha9")]))
    handle, seen = "D2", []
    for _ in range(3):
        found = run(env.step([call("read_document", doc_id=handle)])).observation
        assert found.error is None
        seen += [part.index for part in found.hits]
        handle = next((note.data["handle"] for note in found.notes if note.code == "continues"), "")
    assert (seen, handle) == ([0, 1, 2, 3, 4, 5], "")
    assert run(env.step([search("alpha3")])).observation.hits == ()


def test_an_id_is_used_whole_and_a_part_or_a_document_that_does_not_exist_is_told() -> None:
    _, found, _ = read("a_b_c")
    assert ([part.doc_id for part in found.hits], found.resolved) == (["a_b_c"], {"a_b_c": "a_b_c"})
    _, found, text = read("D2.9")
    assert (found.hits, found.error) == ((), Note("no_such_part"))
    assert "The document has no such part." in text
    assert {read(handle)[1].error.code for handle in ("D7", "long#3", "", "http://x")} == {"unknown_handles"}


def test_a_handle_names_its_first_part_and_parts_are_taken_whole_and_at_least_one() -> None:
    named = {"D12.3": 2, " d12.1 ": 0, "D1.0": 0, **dict.fromkeys(("D12", "a.3", "D1.x", "v1.2"))}
    assert {handle: first_part(handle) for handle in named} == named
    parts = [hit("a", "x" * size, index=n) for n, size in enumerate((400, 40, 40))]
    taken = [take_within(parts, (part.tokens for part in parts), tokens) for tokens in (10, 110, 120)]
    assert (taken, take_within([], [], 10)) == ([parts[:1], parts[:2], parts], [])


TOLD = dict.fromkeys((3, 5, 6), "Missolonghi in Greece. ")
PAGES = [chunk("long", f"alpha{n} {TOLD.get(n, '')}" + f"word{n} " * 60, "Long", n) for n in range(9)]

WHERE = "Is Missolonghi in Greece?"


def test_by_evidence_the_parts_nearest_to_the_question_are_shown_and_the_others_by_their_handles() -> None:
    _, found, text = read("D1", "evidence", PAGES, WHERE)
    assert [part.index for part in found.hits] == [3, 5], "in document order"
    assert "[3 passages left out: read D1.1]\n[D1.4] Long\n alpha3 " in text
    assert "[1 passage left out: read D1.5]\n[D1.6] Long\n alpha5 " in text
    assert found.notes[0] == Note("continues", {"handle": "D1.7", "parts": 3})
    for handle, indexes in (("D1.1", [0, 1]), ("D1.8", [7, 8])):
        _, found, text = read(handle, "evidence", PAGES, WHERE)
        assert [part.index for part in found.hits] == indexes
        assert "left out" not in text


def test_a_document_that_fits_is_read_whole_by_either_rule() -> None:
    small = [chunk("long", page.text[:300], "Long", n) for n, page in enumerate(PAGES[4:7])]
    for by in ("order", "evidence"):
        env = make_env(Env(read=Read(by=by)), retriever=WordRetriever(small))
        step = play(env, search("alpha4"), call("read_document", doc_id="D1"), query=WHERE)[1]
        assert [part.index for part in step.observation.hits] == [0, 1, 2]
        assert "continues" not in [note.code for note in step.observation.notes]
        assert "left out" not in text_of(step.context)
        assert ("nearest to the question" in env.renderer.static.text) == (by == "evidence")


@pytest.mark.parametrize("unit", ["document", "chunk"])
def test_a_reading_by_evidence_is_replayed(unit: Unit) -> None:
    for tokens in (1, 250, 600, 5000):
        config = Env(read=Read(tokens=tokens, by="evidence"))
        plan = Script(search("alpha0"), *(call("read_document", doc_id=handle) for handle in ("D1", "D1.2", "D1")))
        episode = run(rollout(make_env(config, retriever=WordRetriever(PAGES, unit)), plan, Task("t", WHERE)))
        assert replay_episode(episode, config) == ReplayReport(len(episode.turns), len(episode.turns))
        assert [len(seen.hits) > 0 for seen in episode.observations] == [True, True, True, True, False]


def review(*handles: str) -> tuple[Observation, str]:
    step = play(make_env(), search("Ada Byron"), call("review_docs", doc_ids=list(handles)))[1]
    return step.observation, text_of(step.context)


def test_the_full_text_is_shown_and_nothing_is_asked() -> None:
    retriever = WordRetriever([chunk("a", " ".join(f"Sentence {n} is here." for n in range(30)))])
    env = make_env(retriever=retriever)
    step = play(env, search("Sentence"), call("review_docs", doc_ids=["D1"]))[1]
    assert retriever.calls == 1
    assert retriever.chunks[0].text in text_of(step.context)
    assert step.observation.delta.new == ()


def test_unknown_handles_are_told_beside_those_that_are_known_and_alone_they_are_an_error() -> None:
    found, text = review("D1", "D9", "byron")
    assert [hit.doc_id for hit in found.hits] == ["ada", "byron"]
    assert found.resolved == {"D1": "ada", "byron": "byron"}
    assert "Unknown: D9 (1)." in text
    assert CORPUS[1].text in text
    assert (review()[0].error, review("x", "y")[0].error.code) == (Note("no_handles"), "unknown_handles")


def test_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.tools.documents.MOST_REVIEWED", 2)
    found, _ = review("D1", "d1", "ada", "D2", "D3")
    assert [hit.doc_id for hit in found.hits] == ["ada", "babbage"]
    assert Note("documents_left_out", {"count": 1, "limit": 2}) in found.notes
    monkeypatch.setattr("harness1.tools.documents.REVIEW_TOKENS", 20)
    found, _ = review("D1", "D2")
    assert len(found.hits) == 1
    assert Note("parts_left_out", {"count": 1}) in found.notes


CLAIM = "Byron died in 1824."


class Recorder:
    """Says yes to what mentions a poet, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[UnitId, ...]]] = []
        self.longest = 0

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        self.asked.append((claim, tuple(unit_id for unit_id, _ in documents)))
        self.longest = max(self.longest, *(len(text) for _, text in documents))
        return [Judgement("yes" if "poet" in text else "unclear", text[:10]) for _, text in documents]


def verify(*handles: str, claim: str = CLAIM) -> ToolCall:
    return call("verify", doc_ids=list(handles), claim=claim)


def observed(*actions: ToolCall) -> tuple[list[Observation], Recorder, str]:
    recorder = Recorder()
    steps = play(make_env(verifier=recorder), search("Ada Byron"), *actions)
    return [step.observation for step in steps[1:]], recorder, text_of(steps[-1].context)


def test_verdicts_come_in_the_order_asked_with_their_sentence() -> None:
    (seen,), recorder, text = observed(verify("D3", "D1"))
    assert [(verdict.unit_id, verdict.label) for verdict in seen.verdicts] == [("byron", "yes"), ("ada", "unclear")]
    assert "D3 yes: Lord Byron" in text
    assert recorder.asked == [(CLAIM, ("byron", "ada"))]


def test_a_claim_is_paid_for_once_for_each_document() -> None:
    again = verify("D1", "D3", claim=" byron  DIED in 1824 "), verify("D3", "D1")
    seen, recorder, text = observed(verify("D1"), *again, verify("D1", claim="Byron died in 1825."))
    assert [units for _, units in recorder.asked] == [("ada",), ("byron",), ("ada",)]
    cached = [[verdict.cached for verdict in each.verdicts] for each in seen]
    assert cached == [[False], [True, False], [True, True], [False]]
    assert "D1 unclear (known): Ada Lovela" in text


def test_a_document_that_has_grown_is_judged_again_and_the_newest_verdict_holds() -> None:
    chunks = [chunk("b", "Byron wrote.", "B", 0), chunk("b", "The poet died there.", "B", 1)]
    recorder = Recorder()
    env = make_env(chunks=chunks, verifier=recorder)
    ask = call("verify", doc_ids=["D1"], claim=CLAIM)
    steps = play(env, search("Byron"), ask, ask, search("poet"), ask, ask)
    verdicts = [step.observation.verdicts for step in steps if step.observation and step.observation.verdicts]
    told = [(label.label, label.cached) for (label,) in verdicts]
    assert told == [("unclear", False), ("unclear", True), ("yes", False), ("yes", True)]
    assert len(recorder.asked) == 2
    assert [kept.label for kept in env.state.memory.verification.verdicts.values()] == ["yes"]
    twin = make_env(chunks=[])
    twin.begin(WorkingMemory.empty("Where did the father of Ada Lovelace die?", "document"))
    assert [twin.replay(step.turn).turn for step in steps] == [step.turn for step in steps]


def test_limits_and_unknown_handles_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.tools.documents.MOST_JUDGED", 1)
    monkeypatch.setattr("harness1.tools.documents.JUDGED_CHARACTERS", 15)
    (seen,), recorder, _ = observed(verify("D3", "D1", "D77"))
    assert (recorder.asked, recorder.longest) == ([(CLAIM, ("byron",))], 15)
    assert {"unknown_handles", "documents_left_out"} <= {note.code for note in seen.notes}


def test_a_claim_must_be_a_statement_and_documents_must_be_named() -> None:
    seen, recorder, _ = observed(verify("D1", claim=" so  "), verify(), verify("X"))
    assert [each.error.code for each in seen] == ["claim_too_short", "no_handles", "unknown_handles"]
    assert recorder.asked == []


def curated(*actions: ToolCall, env: Env | None = None) -> tuple[dict[str, str], Observation, str]:
    """The set after searching (which curates D1 to D3 as fair) and the actions, and what the last one was told."""
    world = make_env(msgspec.structs.replace(env or Env(), auto_populate=AutoPopulate(by="first")))
    step = play(world, search("Ada Byron"), *actions)[-1]
    return dict(world.state.memory.curated.tags), step.observation, text_of(step.context)


def test_adding_tagging_and_removing_by_handle_or_id() -> None:
    tags, seen, text = curated(curate(add_ids=["D2", "[D1]"], remove_ids=["byron"], importance={"d1": "high"}))
    assert (tags, seen.delta.retagged) == ({"ada": "high", "babbage": "fair"}, {"ada": "high"})
    assert seen.delta.removed == ("byron",)
    assert seen.resolved == {"D2": "babbage", "[D1]": "ada", "byron": "byron", "d1": "ada"}
    assert "Re-tagged: D1 high.\nRemoved: D3." in text


def test_a_tag_alone_retags_what_is_curated_and_adds_nothing_and_an_unknown_one_counts_as_fair() -> None:
    tags, _, _ = curated(curate(remove_ids=["D3"]), curate(importance={"D1": "very_high", "D3": "high"}))
    assert tags == {"ada": "very_high", "babbage": "fair"}
    tags, seen, _ = curated(curate(importance={"D1": "high"}), curate(add_ids=["D1"]))
    assert (tags["ada"], seen.error) == ("high", None), "a document that is named again keeps its tag"
    tags, _, text = curated(curate(importance={"D1": "high"}), curate(importance={"D1": "crucial"}))
    assert tags["ada"] == "fair"
    assert "Unknown tags crucial count as fair" in text


def test_unknown_handles_are_told_wherever_they_stand_and_a_call_that_names_nothing_useful_is_an_error() -> None:
    _, seen, text = curated(curate(add_ids=["D1", "D7"], remove_ids=["D8"], importance={"D9": "high", "D7": "low"}))
    assert seen.error is None
    assert "Unknown: D7, D8, D9 (3)." in text
    _, seen, text = curated(curate(remove_ids=["D3"]), curate(remove_ids=["D3"]))
    assert seen.error is None
    assert "Not in the curated set: D3 (1)." in text
    assert "Not in the curated set" not in curated(curate(remove_ids=["D3"]))[2]
    assert curated(curate())[1].error.code == "nothing_to_curate"
    for strange in (["X"], ["ada_1", "http://ada/0_1", "ada#0"]):
        assert curated(curate(add_ids=strange))[1].error.code == "unknown_handles"


def test_the_full_set_reports_evictions_and_refusals() -> None:
    env = Env(curation=Curation(cap=2))
    _, seen, text = curated(curate(add_ids=["D3"], importance={"D3": "high"}), env=env)
    assert seen.delta.evicted == ("ada",)
    assert "Evicted for more important ones: D1." in text
    _, seen, text = curated(curate(add_ids=["D3"]), env=env)
    assert seen.delta.refused == ("byron",)
    assert "Refused, the set is full: D3." in text


def test_without_tags_there_is_no_importance_to_give() -> None:
    env = Env().switch(tags=False)
    _, seen, _ = curated(curate(add_ids=["D1"], importance={"D1": "high"}), env=env)
    assert seen.error.code == "bad_arguments"
    tags, _, text = curated(curate(remove_ids=["D1"]), curate(add_ids=["D1"]), env=env)
    assert list(tags) == ["babbage", "byron", "ada"]
    assert "Added: D1." in text


def test_it_ends_and_changes_nothing_but_the_turn() -> None:
    env = make_env()
    play(env, search("Ada"))
    before = env.state.memory.curated.in_order()
    step = run(env.step([END]))
    assert (step.done, step.context) == (StopReason.END_SEARCH, None)
    assert env.state.memory.curated.in_order() == before
