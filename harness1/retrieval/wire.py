"""Messages of the retrieval wire, as typed JSON: our native route, and the route of Search-R1.

Every native call may name the index and the ranking settings that the client counts on; a server that has others
refuses it (409), so that no client silently gets the rankings of another index.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Retrieval
from harness1.config.settings import Count
from harness1.records import Chunk, ChunkId, DocId, Record
from harness1.retrieval.protocol import IndexInfo, SearchRequest, SearchResult


class About(Record):
    """`GET /info`: the index that is served, and how it ranks."""

    index: IndexInfo
    retrieval: Retrieval


class Failure(Record):
    """The body of every answer with a status of 400 and above."""

    error: str


class SearchCall(Record, kw_only=True):
    """`POST /search`; the deadlines count from the moment the call arrives."""

    requests: Annotated[tuple[SearchRequest, ...], Meta(min_length=1)]
    retrieval: Retrieval | None = None
    index_hash: str | None = None


class SearchAnswer(Record):
    """The answer to one query: either a result or a fault."""

    result: SearchResult | None = None
    fault: str | None = None


class SearchAnswers(Record):
    """One answer for each query of a `SearchCall`, in its order."""

    answers: tuple[SearchAnswer, ...]


class GrepCall(Record, kw_only=True):
    """`POST /grep`."""

    pattern: str
    limit: Count
    deadline: float = 30.0
    index_hash: str | None = None


class ReadCall(Record, kw_only=True):
    """`POST /read`."""

    doc_id: DocId
    index_hash: str | None = None


class GetCall(Record, kw_only=True):
    """`POST /get`."""

    chunk_ids: tuple[ChunkId, ...]
    index_hash: str | None = None


class ChunksAnswer(Record):
    """The answer to grep, read and get: exactly one of the three fields is set."""

    chunks: tuple[Chunk, ...] | None = None
    bad_pattern: str | None = None
    fault: str | None = None


class RetrieveCall(Record):
    """`POST /retrieve` of Search-R1; a `topk` of null or 0 means the server's default."""

    queries: tuple[str, ...]
    topk: Count | None = None
    return_scores: bool = False


class Passage(Record):
    """A document in the format of Search-R1: the first line of `contents` is the title."""

    id: str
    contents: str


class ScoredPassage(Record):
    """A passage of an answer to `return_scores`."""

    document: Passage
    score: float


class RetrieveAnswer(Record):
    """The passages of each query, best first, with scores if they were asked for."""

    result: tuple[tuple[ScoredPassage | Passage, ...], ...]
