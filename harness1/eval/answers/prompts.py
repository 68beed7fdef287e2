"""All prompts of answerers and judges, the documents in them, and the parsing of replies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from importlib import resources
from itertools import accumulate
from types import MappingProxyType

import msgspec

from harness1.config import Machine
from harness1.env.world import patiently
from harness1.errors import InfrastructureFault
from harness1.hashing import digest
from harness1.http.model_endpoint import Messages, defuse, restore, strip_answer
from harness1.records import Chunk, ChunkId, DocId, Record, UnitId
from harness1.retrieval.corpus import approximate_tokens
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest, SearchResult

PROMPTS: Mapping[str, str] = MappingProxyType(
    msgspec.toml.decode(resources.files(__package__).joinpath("prompts.toml").read_bytes(), type=dict[str, str])
)
"""The system message of each kind of question, as recorded."""


class QuotedDocument(Record):
    """A document in an answerer's prompt: its title and its whole text."""

    unit_id: UnitId
    title: str
    text: str


def closed_question(query: str) -> Messages:
    """Return the messages that ask a question without documents."""
    return _messages("closed", _tagged("question", query))


def open_question(query: str, sources: Sequence[QuotedDocument]) -> Messages:
    """Return the messages that ask a question about documents, in their order, without their ids and tags."""
    documents = [
        _tagged("document", f"{source.title}\n{source.text}" if source.title else source.text) for source in sources
    ]
    return _messages("open", "\n".join([*documents, _tagged("question", query)]))


def judge_question(query: str, golds: Sequence[str], answer: str) -> Messages:
    """Return the messages that ask whether an answer is right."""
    parts = {"question": query, "correct": "\n".join(golds), "answer": answer}
    return _messages("judge", "\n".join(_tagged(name, text) for name, text in parts.items()))


def prompt_hash(messages: Messages, settings: Mapping[str, int]) -> str:
    """Return the hash that identifies a request: every word of it, and the sampling settings."""
    return digest([messages, dict(settings)])


_LABEL = re.compile(r"^(?:the\s+)?answer\s*(?:is\s*:|:)\s*", re.I)


def read_answer(said: str) -> str:
    """Return the answer in a reply: its first line with words, after thoughts and a label `Answer:`; empty if none."""
    lines = (_LABEL.sub("", line.strip().strip("*`")).strip("*` ") for line in strip_answer(said).splitlines())
    return restore(" ".join(next((line for line in lines if line), "").split()))


def read_verdict(said: str) -> bool | None:
    """Return whether a judge's reply is `correct`; None unless it is one of the two words, in any case, with or without
    a full stop, and with or without thoughts before it."""
    return {"correct": True, "incorrect": False}.get(strip_answer(said).removesuffix(".").strip("*` ").casefold())


def _messages(kind: str, user: str) -> Messages:
    return [{"role": "system", "content": PROMPTS[kind]}, {"role": "user", "content": user}]


def _tagged(name: str, text: str) -> str:
    return f"<{name}>\n{defuse(text)}\n</{name}>"


def within_budget(sources: Sequence[QuotedDocument], documents: int, tokens: int) -> tuple[QuotedDocument, ...]:
    """Return as many whole documents as fit, in order, dropping the lowest ranks first. A document larger than the
    whole budget is left out beforehand, since dropping others would not make room for it.

    Args:
        documents, tokens: the limits; tokens of title and text are approximate (characters / 4).
    """
    fitting = [source for source in sources[:documents] if _tokens(source) <= tokens]
    sizes = accumulate(map(_tokens, fitting))
    return tuple(source for source, size in zip(fitting, sizes, strict=True) if size <= tokens)


def _tokens(source: QuotedDocument) -> int:
    return approximate_tokens(source.title) + approximate_tokens(source.text)


class DocumentReader:
    """A reader of full texts from a retriever, with `machine.attempts` attempts per request.

    Args:
        machine: number of attempts, and the seconds that each may take.
    """

    def __init__(self, retriever: Retriever, machine: Machine) -> None:
        self._retriever, self._run = retriever, machine

    @property
    def index_hash(self) -> str:
        return self._retriever.info.index_hash

    async def sources(self, units: Sequence[UnitId]) -> list[QuotedDocument]:
        """Return the documents, or the chunks if the corpus is scored by chunks, in the order requested.

        Raises:
            InfrastructureFault: the index failed, or lacks one of the units.
        """
        return list(await asyncio.gather(*map(self._source, units)))

    async def single_shot(self, query: str, size: int) -> list[UnitId]:
        """Return the first `size` units that a single search finds, best first; fewer if it finds no more.

        Several chunks of one document are one unit: the search is deepened until there are enough units.

        Raises:
            InfrastructureFault: the index failed.
        """
        depth, units = size, list[UnitId]()
        while len(units) < size:
            hits = (await patiently(partial(self._search, query, depth), self._run)).hits
            units = list(dict.fromkeys(self._unit(scored.chunk) for scored in hits))
            if len(hits) < depth:
                break
            depth *= 2
        return units[:size]

    async def _search(self, query: str, depth: int) -> SearchResult | RetrievalFault:
        (result,) = await self._retriever.search([SearchRequest(query, depth, deadline=self._run.call_deadline_s)])
        return result

    def _unit(self, chunk: Chunk) -> UnitId:
        return UnitId(chunk.chunk_id if self._retriever.info.unit == "chunk" else chunk.doc_id)

    async def _source(self, unit: UnitId) -> QuotedDocument:
        def ask() -> Awaitable[tuple[Chunk, ...] | RetrievalFault]:
            if self._retriever.info.unit == "chunk":
                return self._retriever.get([ChunkId(unit)])
            return self._retriever.read(DocId(unit))

        chunks = await patiently(ask, self._run)
        if not chunks:
            raise InfrastructureFault(f"the index no longer has {unit!r}")
        # Chunks are cut at white space, which is lost: replace it by a line break.
        return QuotedDocument(unit, chunks[0].title, "\n".join(chunk.text for chunk in chunks))
