"""The edge retries, waits no longer than allowed, and never turns a fault into an empty result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from harness1.config import Machine
from harness1.env.environment import World
from harness1.env.verifiers import Judgement, LexicalVerifier, VerifierFault
from harness1.errors import InfrastructureFault
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Chunk, DocId, Ranking, UnitId
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from harness1.tools.tool import Answer, GrepFor, Judge, ReadDocument, Request, SearchFor
from tests.support import CORPUS, QUICK, WordRetriever, hit, run

ASKED: tuple[Request, ...] = (
    SearchFor(("Ada Lovelace",), 5),
    GrepFor("Byron", 5),
    ReadDocument(DocId("ada")),
    Judge("Ada wrote programs.", ((UnitId("ada"), CORPUS[0].text),)),
)


class FailingVerifier(LexicalVerifier):
    def __init__(self, faults: int) -> None:
        super().__init__()
        self.faults = faults

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        self.faults -= 1
        return [VerifierFault("down")] if self.faults >= 0 else await super().judge(claim, documents)


class Slow(WordRetriever):
    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        await asyncio.sleep(60)
        return await super().search(requests)


MEMORY = WorkingMemory.empty("q", "document")


def answer(request: Request, faults: int = 0) -> Answer:
    return run(World(WordRetriever(CORPUS, faults=faults), FailingVerifier(faults), QUICK).answer(request, MEMORY))


@pytest.mark.parametrize("request_", ASKED)
def test_a_fault_that_is_retried_away_leaves_no_trace_and_one_that_stays_is_raised(request_: Request) -> None:
    assert answer(request_, 1) == answer(request_, 2) == answer(request_) != Answer()
    with pytest.raises(InfrastructureFault, match=r"down \(3 attempts\)"):
        answer(request_, faults=3)


def test_no_answer_in_time_is_a_fault_and_a_cancelled_call_is_cancelled() -> None:
    edge = World(Slow(CORPUS), LexicalVerifier(), Machine(attempts=2, call_deadline_s=0.02))
    with pytest.raises(InfrastructureFault, match=r"no answer within 0.02 s \(2 attempts\)"):
        run(edge.answer(SearchFor(("Ada",), 5), MEMORY))
    with pytest.raises(asyncio.CancelledError):
        run(World(Raising(CORPUS), Silent(), QUICK).answer(ASKED[2], MEMORY))


class Raising(WordRetriever):
    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...]:
        self.calls += 1
        raise KeyError("shard")

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        return (await super().search(requests))[1:]

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...]:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await super().read(doc_id)


class Silent(LexicalVerifier):
    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        return []


@pytest.mark.parametrize(
    ("request_", "reason"),
    [(GrepFor("x", 5), "KeyError"), (SearchFor(("Ada",), 5), "0 results for 1"), (ASKED[3], "0 judgements for 1")],
)
def test_what_an_engine_raises_or_leaves_out_is_a_fault(request_: Request, reason: str) -> None:
    edge = World(Raising(CORPUS), Silent(), QUICK)
    with pytest.raises(InfrastructureFault, match=rf"{reason}.*\(3 attempts\)"):
        run(edge.answer(request_, MEMORY))


def test_only_the_queries_that_failed_are_asked_again_and_a_bad_pattern_is_the_policys_mistake() -> None:
    retriever = WordRetriever(CORPUS, faults=1)
    edge = World(retriever, LexicalVerifier(), QUICK)
    found = run(edge.answer(SearchFor(("Ada", "Byron", "town"), 5), MEMORY))
    assert (retriever.calls, [ranking.query for ranking in found.rankings]) == (4, ["Ada", "Byron", "town"])
    assert all(ranking.chunk_ids for ranking in found.rankings)
    retriever = WordRetriever(CORPUS)
    assert run(World(retriever, LexicalVerifier(), QUICK).answer(GrepFor("(", 5), MEMORY)).bad_pattern
    assert retriever.calls == 1


def test_each_chunk_comes_once_unless_it_is_stored_and_each_query_keeps_its_ranking() -> None:
    found = answer(SearchFor(("Lord Byron", "Byron Ada"), 5))
    ids = [each.chunk_id for each in found.hits]
    assert len(ids) == len(set(ids))
    assert found.rankings[0] == Ranking("Lord Byron", ("ada#0", "byron#0"))
    assert set(found.rankings[1].chunk_ids) == {"ada#0", "byron#0", "babbage#0"}
    assert all(each.tokens == -(-len(each.text) // 4) for each in found.hits)
    memory = WorkingMemory.empty("q", "document")
    memory.store[CORPUS[0].chunk_id] = hit("ada", "text")
    found = run(World(WordRetriever(CORPUS), LexicalVerifier(), QUICK).answer(SearchFor(("Ada Byron",), 5), memory))
    assert "ada" not in {each.doc_id for each in found.hits}
