"""Embedders and rerankers behind an address, which are believed only as far as they can be checked: an answer has one
finite number, or vector, for each text that was sent. Anything else is a fault of the infrastructure, never a ranking.

What decides the vectors or scores of a server is known by the name of its model alone; the address is in no hash, so
that the same model on another machine serves the same index."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness1.config import Dense, Machine
from harness1.errors import InfrastructureFault, Refusal, UsageError
from harness1.http.loop_thread import LoopThread
from harness1.http.model_endpoint import ModelEndpoint
from harness1.plain import WITH_SERVER, digest, utf8_safe, without_password

SERVED = "openai:"
FEW, MANY, BYTES = 32, 1000, 1 << 20
"""The most texts of a request: what TEI takes unless told otherwise, and what Cohere advises; and the most bytes of its
texts, as TEI takes 2 MB and OpenAI 300,000 tokens."""
ANSWER_BYTES = 16 << 20
"""The largest answer: 32 vectors with 4,096 dimensions take 3 MB."""
CUT: Mapping[str, Any] = {"truncate_prompt_tokens": -1}
"""What makes vLLM cut texts that its model cannot read, which others do by themselves or refuse."""

Pair = tuple[str, str]
"""A query, or a claim, and a text."""
Answer = TypeVar("Answer")
Variant = TypeVar("Variant")


class _Vector(msgspec.Struct):
    index: int
    embedding: list[float]


class _Vectors(msgspec.Struct):
    data: list[_Vector]


class _Place(msgspec.Struct):
    index: int
    relevance_score: float | None = None
    score: float | None = None


class _Ranking(msgspec.Struct):
    results: list[_Place] = []
    data: list[_Place] = []


class _Shape(NamedTuple):
    """How a request for scores names the query and the texts, what else it holds, and how many texts it may have."""

    query: str
    texts: str
    extras: Mapping[str, Any]
    most: int


RERANK = (
    _Shape("query", "documents", CUT, MANY),  # vLLM; llama.cpp ignores what it does not know
    _Shape("query", "documents", {}, MANY),  # Cohere, Jina
    _Shape("query", "texts", {"truncate": True}, FEW),  # TEI
)
SCORE = (_Shape("text_1", "text_2", CUT, MANY), _Shape("text_1", "text_2", {}, MANY))


def is_served(reranker: str) -> bool:
    """Return whether `machine.reranker` is the address of a server, with or without a model's name."""
    return bool(re.match(r"https?://", reranker, re.I) or WITH_SERVER.fullmatch(reranker))


def open_served_embedder(spec: str, settings: Dense, machine: Machine) -> ServedEmbedder:
    """Open the embedder at `openai:MODEL@URL`. Raises UsageError: the name is wrong, or nothing answers at the address;
    InfrastructureFault: it does not embed; MissingExtra."""
    served = WITH_SERVER.fullmatch(spec.removeprefix(SERVED))
    if served is None or not served[1]:
        shown = without_password(spec)
        raise UsageError(f"{shown!r} is not an embedder: write openai:MODEL@http://HOST:PORT/v1")
    return ServedEmbedder(_Server(served[2], machine.embedder_key, machine), served[1], settings.prefixes)


def open_served_scorer(spec: str, machine: Machine) -> ServedScorer:
    """Open the reranker at `URL` or `MODEL@URL`. Raises as `open_served_embedder` does."""
    served = WITH_SERVER.fullmatch(spec)
    model, url = served.groups() if served else ("", spec)
    return ServedScorer(_Server(url, machine.reranker_key, machine), model)


class ServedEmbedder:
    """An `Embedder` behind OpenAI's `/v1/embeddings`, which is asked once when this is made. Whether a query's vector
    depends on others that are asked at the same time is up to the server."""

    def __init__(self, server: _Server, model: str, prefixes: tuple[str, str]) -> None:
        self._server, self._model, self._prefixes = server, model, prefixes
        self._extras, answer = _first_accepted((CUT, {}), lambda extras: self._ask([["water"]], extras, None)[0])
        self.dimensions = len(answer.data[0].embedding) if answer.data else 0
        self._unit_rows(answer, 1)
        self.hash = digest(["served embedder", model, self.dimensions, *prefixes])

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._embed(texts, self._prefixes[1], None)

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._embed(texts, self._prefixes[0], self._server.deadline_s)

    def _embed(self, texts: Sequence[str], prefix: str, deadline_s: float | None) -> NDArray[np.float32]:
        """Embed texts; a blank one, which servers refuse, is zeros."""
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        places = [at for at, text in enumerate(texts) if text.strip()]
        parts = list(divide([utf8_safe(prefix + texts[at]) for at in places], FEW))
        answers = self._ask(parts, self._extras, deadline_s)
        if parts:
            made = [self._unit_rows(answer, len(part)) for answer, part in zip(answers, parts, strict=True)]
            vectors[places] = np.concatenate(made)
        return vectors

    def _ask(self, parts: Sequence[list[str]], extras: Mapping[str, Any], deadline_s: float | None) -> list[_Vectors]:
        bodies = [{"model": self._model, "input": part, **extras} for part in parts]
        return self._server.ask("/embeddings", bodies, _Vectors, deadline_s)

    def _unit_rows(self, answer: _Vectors, count: int) -> NDArray[np.float32]:
        rows = self._server.in_order([(each.index, each.embedding) for each in answer.data], count)
        if wrong := {len(row) for row in rows} - {self.dimensions}:
            raise self._server.fault(f"a vector with {max(wrong)} dimensions instead of {self.dimensions}")
        vectors = np.array(rows, np.float64)
        with np.errstate(over="ignore"):
            lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
        if not (np.isfinite(lengths) & (lengths > 0)).all():
            raise self._server.fault("a vector that is zero or not finite")
        unit: NDArray[np.float32] = (vectors / lengths).astype(np.float32)
        return unit


class ServedScorer:
    """A `Scorer` behind an address that ends in `/rerank`, which is added, or `/score`. Its server is asked once when
    this is made, in each shape until one is not refused. Without a name of the model, the address identifies it."""

    def __init__(self, server: _Server, model: str) -> None:
        self._server, self._model = server, model
        self.hash = digest(["served reranker", model or server.url])
        is_route = server.url.endswith(("/rerank", "/score"))
        self._path = "" if is_route else "/rerank"
        shapes = SCORE if server.url.endswith("/score") else RERANK
        probe = "water", ["water", "iron"]
        self._shape, answer = _first_accepted(shapes, lambda shape: self._ask([probe], shape, None)[0])
        self._scores(answer, len(probe[1]))

    def score(self, pairs: Sequence[Pair]) -> NDArray[np.float64]:
        """Return the scores of the server: probabilities, or log odds."""
        texts: dict[str, dict[str, None]] = {}
        for query, text in pairs:
            texts.setdefault(query, {})[text] = None
        asked = [(query, part) for query, each in texts.items() for part in divide(list(each), self._shape.most)]
        answers = self._ask(asked, self._shape, self._server.deadline_s)
        found: dict[Pair, float] = {}
        for (query, part), answer in zip(asked, answers, strict=True):
            found |= zip([(query, text) for text in part], self._scores(answer, len(part)), strict=True)
        return np.array([found[pair] for pair in pairs], np.float64)

    def stances(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return probabilities of support, and none of contradiction, of which a reranker says nothing."""
        scores = self.score(pairs)
        chances = np.where((scores >= 0) & (scores <= 1), scores, np.exp(-np.logaddexp(0.0, -scores)))
        return np.stack([chances, np.zeros_like(chances)], axis=1).astype(np.float32)

    def _ask(
        self, asked: Sequence[tuple[str, list[str]]], shape: _Shape, deadline_s: float | None
    ) -> list[_Ranking | list[_Place]]:
        named = {"model": self._model} if self._model else {}
        bodies = []
        for query, texts in asked:
            all_of_them = {"top_n": len(texts)} if shape.texts == "documents" else {}
            body = {shape.query: utf8_safe(query), shape.texts: [utf8_safe(text) for text in texts]}
            bodies.append({**named, **body, **all_of_them, **shape.extras})
        return self._server.ask(self._path, bodies, _Ranking | list[_Place], deadline_s)

    def _scores(self, answer: _Ranking | list[_Place], count: int) -> list[float]:
        places = answer if isinstance(answer, list) else answer.results or answer.data
        found = [(each.index, each.score if each.relevance_score is None else each.relevance_score) for each in places]
        scores = [score for score in self._server.in_order(found, count) if score is not None and np.isfinite(score)]
        if len(scores) < count:
            raise self._server.fault("a text without a finite score")
        return scores


class _Server:
    """The server of a model of retrieval, asked from threads that wait for it, or from one with an event loop."""

    def __init__(self, url: str, key: str, machine: Machine) -> None:
        limits = machine.model.timeout_s, machine.attempts, machine.concurrency, ANSWER_BYTES
        self._endpoint = ModelEndpoint(url, key, *limits)
        self.url, self.deadline_s = self._endpoint.url, machine.call_deadline_s

    def ask(self, path: str, bodies: Sequence[object], kind: Any, deadline_s: float | None) -> list[Any]:
        """Return the answers to bodies, which are sent together. `deadline_s` is for all, with their repeats; None:
        each try has its own limit. Raises as `ModelEndpoint.post` does."""
        return _loop().call(self._ask_all(path, bodies, kind, deadline_s))

    async def _ask_all(self, path: str, bodies: Sequence[object], kind: Any, deadline_s: float | None) -> list[Any]:
        tasks = [asyncio.ensure_future(self._endpoint.post(path, body, kind)) for body in bodies]
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.gather(*tasks)
        except TimeoutError as error:
            raise self.fault(f"no answer within {deadline_s:g} s") from error
        finally:
            for task in tasks:
                task.cancel()

    def in_order(self, found: Sequence[tuple[int, Answer]], count: int) -> list[Answer]:
        """Return what was found for each of `count` texts, by its index. Raises InfrastructureFault: another number."""
        if sorted(index for index, _ in found) != list(range(count)):
            raise self.fault(f"{len(found)} results, which are not one for each of {count} texts")
        return [value for _, value in sorted(found, key=lambda each: each[0])]

    def fault(self, reason: str) -> InfrastructureFault:
        """Return the fault that the server is to blame for."""
        return InfrastructureFault(f"{self.url}: {reason}")


@cache
def _loop() -> LoopThread:
    """Return the one loop of all servers: connections last as long as it does, through all calls."""
    return LoopThread("served models")


def _first_accepted(variants: Sequence[Variant], ask: Callable[[Variant], Answer]) -> tuple[Variant, Answer]:
    """Return the first variant of a request that a server does not refuse, and its answer."""
    refusals: list[str] = []
    for variant in variants:
        try:
            return variant, ask(variant)
        except Refusal as refusal:
            refusals.append(str(refusal))
    raise InfrastructureFault("; ".join(dict.fromkeys(refusals)))


def divide(texts: Sequence[str], most: int) -> Iterator[list[str]]:
    """Yield texts in order, at most `most` and `BYTES` bytes at a time; a longer one goes alone."""
    part: list[str] = []
    size = 0
    for text in texts:
        length = len(text.encode("utf-8", "surrogatepass"))
        if part and (len(part) == most or size + length > BYTES):
            yield part
            part, size = [], 0
        part.append(text)
        size += length
    if part:
        yield part
