"""verify: verdicts are asked for once, remembered, and told in the order asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness1.config import Env, Verification
from harness1.env.environment import SearchEnv
from harness1.env.verifiers import Judgement, VerifierFault
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation, ToolCall, UnitId
from tests.support import call, chunk, make_env, play, search, text_of

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


def test_another_claim_is_asked_anew() -> None:
    _, recorder, _, _ = observed(verify("D1"), verify("D1", claim="Byron died in 1825."))
    assert len(recorder.asked) == 2


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
    monkeypatch.setattr(Verification, "documents", 1)
    monkeypatch.setattr(Verification, "characters", 15)
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


def test_a_verdict_is_no_document() -> None:
    (seen,), _, world, _ = observed(verify("D3"))
    assert seen.hits == ()
    assert world.state.memory.history[-1].new == 0
    assert len(world.state.memory.pool.entries) == 3
