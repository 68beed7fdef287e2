"""The world: answers the requests of tools with retriever and verifier, with deadlines and retries.

A fault that remains after all retries becomes an `InfrastructureFault`, never an empty result.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from harness1.config import Machine
from harness1.env.verifiers import Verifier, VerifierFault
from harness1.errors import ToolError
from harness1.http.client import Transient, retry
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import utf8_safe
from harness1.records import Chunk, ChunkId, DocId, Hit, Ranking, Verdict
from harness1.retrieval.corpus import approximate_tokens
from harness1.retrieval.protocol import BadPattern, RetrievalFault, Retriever, SearchRequest, SearchResult
from harness1.tools.tool import Answer, Consult, GrepFor, Judge, ReadDocument, Request, SearchFor

Outcome = TypeVar("Outcome")


class World:
    """Answers requests; environments on one event loop may share it."""

    def __init__(self, retriever: Retriever, verifier: Verifier, machine: Machine) -> None:
        self.retriever, self.verifier, self.machine = retriever, verifier, machine

    async def answer(self, request: Request, memory: WorkingMemory) -> Answer:
        """Answer a request; raise InfrastructureFault if a call failed or missed its deadline, `machine.attempts`
        times."""
        match request:
            case SearchFor():
                return await self._search(request, memory)
            case GrepFor(pattern=pattern, limit=limit):
                return await self._grep(pattern, limit)
            case ReadDocument(doc_id=doc_id):
                return await self._read(doc_id)
            case Judge():
                return await self._judge(request)
            case Consult():
                return await call_engine(partial(_consult, request), self.machine)

    async def _search(self, request: SearchFor, memory: WorkingMemory) -> Answer:
        """Search for all queries at once; repeat only those that failed."""
        seen = frozenset(memory.store)
        deadline = self.machine.call_deadline_s
        searches = [SearchRequest(query, request.k, seen, deadline, request.about) for query in request.queries]

        async def one_batch() -> list[SearchResult] | RetrievalFault:
            pending = [place for place in range(len(searches)) if place not in done]
            results = await self.retriever.search([searches[place] for place in pending])
            if len(results) != len(pending):
                return RetrievalFault(f"{len(results)} results for {len(pending)} queries")
            fault = None
            for place, result in zip(pending, results, strict=True):
                if isinstance(result, RetrievalFault):
                    fault = result
                else:
                    done[place] = result
            return fault or [done[place] for place in range(len(searches))]

        done: dict[int, SearchResult] = {}
        results = await call_engine(one_batch, self.machine)
        hits: dict[ChunkId, Hit] = {}
        rankings = []
        for query, result in zip(request.queries, results, strict=True):
            for rank, scored in enumerate(result.hits):
                hits.setdefault(scored.chunk.chunk_id, _hit(scored.chunk, rank, scored.score, scored.likeness))
            ids = tuple(scored.chunk.chunk_id for scored in result.hits)
            rankings.append(Ranking(query, ids, result.pre_rerank_ids))
        return Answer(tuple(hits.values()), tuple(rankings))

    async def _grep(self, pattern: str, limit: int) -> Answer:
        call = partial(self.retriever.grep, pattern, limit, self.machine.call_deadline_s)
        chunks: tuple[Chunk, ...] | BadPattern = await call_engine(call, self.machine)
        if isinstance(chunks, BadPattern):
            return Answer(bad_pattern=chunks.reason)
        return Answer(_as_answer(chunks).hits, (Ranking(pattern, tuple(chunk.chunk_id for chunk in chunks)),))

    async def _read(self, doc_id: DocId) -> Answer:
        chunks: tuple[Chunk, ...] = await call_engine(partial(self.retriever.read, doc_id), self.machine)
        return _as_answer(chunks)

    async def _judge(self, request: Judge) -> Answer:
        async def once() -> list[Verdict] | VerifierFault:
            judgements = await self.verifier.judge(request.claim, request.texts)
            if len(judgements) != len(request.texts):
                return VerifierFault(f"{len(judgements)} judgements for {len(request.texts)} documents")
            verdicts = []
            for (unit_id, _), judgement in zip(request.texts, judgements, strict=True):
                if isinstance(judgement, VerifierFault):
                    return judgement
                verdicts.append(Verdict(unit_id, request.claim, judgement.label, judgement.sentence))
            return verdicts

        return Answer(verdicts=tuple(await call_engine(once, self.machine)))


async def _consult(request: Consult) -> Answer:
    """Call a function of the user's, in a thread unless it is a coroutine function."""
    function, arguments = request.function, request.arguments
    try:
        if inspect.iscoroutinefunction(function):
            text = await function(**arguments)
        else:
            text = await asyncio.to_thread(function, **arguments)
    except ToolError as error:
        return Answer(refused=utf8_safe(str(error))[: request.characters])
    if not isinstance(text, str):
        raise TypeError(f"the tool {function.__name__} returned {type(text).__name__}, not a text")
    cut = f" ({len(text)} characters)"
    kept = text if len(text) <= request.characters else text[: request.characters].rstrip() + cut
    return Answer(text=utf8_safe(kept))


async def call_engine(
    call: Callable[[], Awaitable[Outcome | RetrievalFault | VerifierFault]], machine: Machine
) -> Outcome:
    """Await a call of an engine, and repeat it if it fails or exceeds `machine.call_deadline_s`. Raise
    InfrastructureFault if it failed `machine.attempts` times."""

    async def once() -> Outcome:
        try:
            async with asyncio.timeout(machine.call_deadline_s):
                result = await call()
        except TimeoutError as error:
            raise Transient(f"no answer within {machine.call_deadline_s:g} s") from error
        except Exception as error:
            # An engine may raise anything, and must not end the other episodes of a run.
            raise Transient(f"{type(error).__name__}: {error}") from error
        if isinstance(result, RetrievalFault | VerifierFault):
            raise Transient(result.message)
        return result

    return await retry(once, machine.attempts)


def _hit(chunk: Chunk, rank: int, score: float = 0.0, likeness: float | None = None) -> Hit:
    tokens = approximate_tokens(chunk.text)
    return Hit(chunk.chunk_id, chunk.doc_id, chunk.index, chunk.title, chunk.text, score, rank, tokens, likeness)


def _as_answer(chunks: tuple[Chunk, ...]) -> Answer:
    return Answer(tuple(_hit(chunk, rank) for rank, chunk in enumerate(chunks)))
