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
from harness1.records import Note, Observation, StopReason, Task, ToolCall, Unit, UnitId
from harness1.tools.documents import first_part, take_within
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
    assert [part.index for part in env.state.memory.hits_of(found.hits[0].doc_id)] == [0, 1]


@pytest.mark.parametrize("unit", ["document", "chunk"])
def test_following_the_handles_reads_the_whole_document(unit: Unit) -> None:
    env = make_env(Env(read=Read(tokens=250, by="order")), retriever=WordRetriever(CHUNKS, unit))
    handle, seen = "D2", []
    actions: list[ToolCall] = [search("alpha0 alpha9")]
    for _ in range(3):
        actions.append(call("read_document", doc_id=handle))
        found = play(env, *actions)[-1].observation
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
    assert found.error.code == "unknown_handles"


def test_what_was_read_is_not_searched_again() -> None:
    env = make_env(retriever=WordRetriever(CHUNKS))
    steps = play(env, search("alpha0"), call("read_document", doc_id="D1"), search("alpha3"))
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
        env = make_env(Env(read=Read(by=by)), retriever=WordRetriever(small))
        step = play(env, search("alpha4"), call("read_document", doc_id="D1"), query=WHERE)[1]
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
    rules = [make_env(Env(read=Read(by="evidence")).switch(read=on)).renderer.static.text for on in (True, False)]
    assert ["nearest to the question" in text for text in rules] == [True, False]
    assert "nearest to the question" not in make_env(Env(read=Read(by="order"))).renderer.static.text


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
    assert error.code == "unknown_handles"


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
    """Says yes to what mentions Byron, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[UnitId, ...]]] = []
        self.longest = 0

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        self.asked.append((claim, tuple(unit_id for unit_id, _ in documents)))
        self.longest = max(self.longest, *(len(text) for _, text in documents))
        return [Judgement("yes" if "poet" in text else "unclear", text[:10]) for _, text in documents]


def verify(*handles: str, claim: str = CLAIM) -> ToolCall:
    return call("verify", doc_ids=list(handles), claim=claim)


def observed(*actions: ToolCall, env: Env | None = None) -> tuple[list[Observation], Recorder, SearchEnv, str]:
    recorder = Recorder()
    world = make_env(env, verifier=recorder)
    steps = play(world, search("Ada Byron"), *actions)
    observations = [step.observation for step in steps[1:] if step.observation]
    return observations, recorder, world, text_of(steps[-1].context)


def test_verdicts_come_in_the_order_asked_with_their_sentence() -> None:
    (seen,), recorder, _, text = observed(verify("D3", "D1"))
    assert [(verdict.unit_id, verdict.label) for verdict in seen.verdicts] == [("byron", "yes"), ("ada", "unclear")]
    assert "D3 yes: Lord Byron" in text
    assert recorder.asked == [(CLAIM, ("byron", "ada"))]


def test_a_claim_is_paid_for_once_for_each_document() -> None:
    seen, recorder, _, text = observed(
        verify("D1"), verify("D1", "D3", claim=" byron  DIED in 1824 "), verify("D3", "D1")
    )
    assert [units for _, units in recorder.asked] == [("ada",), ("byron",)]
    assert [[verdict.cached for verdict in each.verdicts] for each in seen] == [[False], [True, False], [True, True]]
    assert "D1 unclear (known): Ada Lovela" in text
    _, recorder, world, _ = observed(verify("D1"), verify("D1", claim="Byron died in 1825."))
    assert len(recorder.asked) == 2
    assert (world.state.memory.history[-1].new, len(world.state.memory.pool.entries)) == (0, 3)


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
    (seen,), recorder, _, _ = observed(verify("D3", "D1", "D77"))
    assert recorder.asked == [(CLAIM, ("byron",))]
    assert recorder.longest == 15
    codes = {note.code for note in seen.notes}
    assert {"unknown_handles", "documents_left_out"} <= codes


def test_a_claim_must_be_a_statement_and_documents_must_be_named() -> None:
    seen, recorder, _, _ = observed(verify("D1", claim=" so  "), verify(), verify("X"))
    assert seen[0].error == Note("claim_too_short", {"characters": 6})
    assert seen[1].error == Note("no_handles")
    assert seen[2].error is not None
    assert recorder.asked == []


def curated(*actions: ToolCall, env: Env | None = None) -> tuple[dict[str, str], Observation, str]:
    """The set after searching (which curates D1 to D3 as fair) and the actions, and what the last one was told."""
    world = make_env(msgspec.structs.replace(env or Env(), auto_populate=AutoPopulate(by="first")))
    step = play(world, search("Ada Byron"), *actions)[-1]
    assert step.observation is not None
    return dict(world.state.memory.curated.tags), step.observation, text_of(step.context)


def test_adding_tagging_and_removing_by_handle_or_id() -> None:
    tags, seen, text = curated(curate(add_ids=["D2", "[D1]"], remove_ids=["byron"], importance={"d1": "high"}))
    assert tags == {"ada": "high", "babbage": "fair"}
    assert seen.delta.retagged == {"ada": "high"}
    assert seen.delta.removed == ("byron",)
    assert seen.resolved == {"D2": "babbage", "[D1]": "ada", "byron": "byron", "d1": "ada"}
    assert "Re-tagged: D1 high.\nRemoved: D3." in text


def test_a_tag_alone_retags_what_is_curated_and_adds_nothing() -> None:
    tags, _, _ = curated(curate(remove_ids=["D3"]), curate(importance={"D1": "very_high", "D3": "high"}))
    assert tags == {"ada": "very_high", "babbage": "fair"}
    tags, seen, _ = curated(curate(importance={"D1": "high"}), curate(add_ids=["D1"]))
    assert (tags["ada"], seen.error) == ("high", None), "a document that is named again keeps its tag"


def test_unknown_handles_are_told_wherever_they_stand() -> None:
    _, seen, text = curated(curate(add_ids=["D1", "D7"], remove_ids=["D8"], importance={"D9": "high", "D7": "low"}))
    assert seen.error is None
    assert "Unknown: D7, D8, D9 (3)." in text


def test_an_unknown_tag_counts_as_fair_and_is_told() -> None:
    tags, _, text = curated(curate(importance={"D1": "high"}), curate(importance={"D1": "crucial"}))
    assert tags["ada"] == "fair"
    assert "Unknown tags crucial count as fair" in text


def test_a_call_that_names_nothing_useful_is_an_error() -> None:
    strange = curate(add_ids=["ada_1", "http://ada/0_1", "ada#0"])
    unknown = ((curate(add_ids=["X"]), "unknown_handles"), (strange, "unknown_handles"))
    for action, code in ((curate(), "nothing_to_curate"), *unknown):
        _, seen, _ = curated(action)
        assert seen.error.code == code


def test_taking_out_what_is_not_in_is_told() -> None:
    _, seen, text = curated(curate(remove_ids=["D3"]), curate(remove_ids=["D3"]))
    assert seen.error is None
    assert "Not in the curated set: D3 (1)." in text
    _, _, text = curated(curate(remove_ids=["D3"]))
    assert "Not in the curated set" not in text


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
    before = list(env.state.memory.curated.in_order())
    step = run(env.step([END]))
    assert (step.done, step.context) == (StopReason.END_SEARCH, None)
    assert env.state.memory.curated.in_order() == before
