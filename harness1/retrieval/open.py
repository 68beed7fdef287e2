"""Opens a retriever by what a user typed. A plugin names an `Opener` in `harness1.retrievers`; `FILE.py:NAME` is a
function or class of one's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness1.config import Config
from harness1.errors import ConfigError, UsageError
from harness1.plain import digest, is_redacted
from harness1.plugins import call_added, find_plugin, identity, is_own, load_own, open_added, plugin_names, whole_name
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.protocol import Found, IndexInfo, RetrievalFault, Retriever, Scored, SearchRequest, SearchResult
from harness1.retrieval.sharing import CACHED_SEARCHES, CachingRetriever

ENGINES = frozenset({"http", "https", "web"})
Opener = Callable[[str, Config], Retriever]
_NO_GREP = "a function has no regular expressions: --set env.grep.on=false"


def open_retriever(spec: str, config: Config = Config()) -> Retriever:
    """Open an index folder, an engine by `PREFIX:REST` for one of `ENGINES` or of another package, such as
    `http://HOST:8000`, or a function or class of one's own as `FILE.py:NAME`.

    Equal searches are answered from a cache of `CACHED_SEARCHES` results. Deadlines are in seconds; scores are
    the engine's own.

    Raises:
        UsageError: the address is one that was recorded without its secrets, or the engine is another package's, and
            two have its name, or it cannot be imported.
        CorpusError: the folder is not an index.
        SchemaError: the index was made by a newer version of the package.
        ConfigError: the settings ask for a feature that the engine lacks.
        MissingExtra: a package that the engine needs is not installed.
        InfrastructureFault: the engine is a server that does not answer.
    """
    prefix, rest = split_engine(spec)
    if prefix is not None and is_redacted(spec):
        raise UsageError(f"{spec} was recorded without its password or key: give the whole address with --index")
    return CachingRetriever(_open(prefix, rest, config), CACHED_SEARCHES, config.env.retrieval)


def _open(prefix: str | None, rest: str, config: Config) -> Retriever:
    if prefix is not None and is_own(prefix):
        return open_own(prefix, config)
    added: Opener | None = find_plugin("retrievers", prefix, ENGINES) if prefix else None
    if added is not None:
        opened: Retriever = open_added("retrievers", prefix or "", added, rest, config)
        return opened
    if prefix is None:
        from harness1.retrieval.retriever import open_embedded

        return open_embedded(Path(rest), config)
    if prefix in ("http", "https"):
        from harness1.retrieval.engines.remote import open_http

        return open_http(f"{prefix}:{rest}", config)
    from harness1.retrieval.engines.web import open_web

    return open_web(rest, config)


def is_engine(spec: str) -> bool:
    """Return whether a spec names an engine by its prefix, and not a folder by its path."""
    return split_engine(spec)[0] is not None


def split_engine(spec: str) -> tuple[str | None, str]:
    """Return an engine's prefix and the rest; None and the spec for a folder. `FILE.py:NAME` is all prefix."""
    if is_own(spec):
        return spec, ""
    prefix, colon, rest = spec.partition(":")
    known = bool(colon) and (prefix in ENGINES or prefix in plugin_names("retrievers"))
    return (prefix, rest) if known else (None, spec)


def absolute_index(index: str) -> str:
    """Return an index folder by its whole path, so that the run can be replayed from anywhere; an engine as named."""
    return whole_name(index) if is_engine(index) else str(Path(index).resolve())


def open_own(name: str, config: Config) -> Retriever:
    """Open what `FILE.py:NAME` names: a class, made without arguments, with the methods of `Retriever`; or a function
    of a query and a number, which returns as many documents at most, best first, as mappings with an `id`, a `text`,
    and perhaps a `title` and a `score`. Raises UsageError: neither; ConfigError: a function, with `grep`."""
    found = load_own(name)
    if inspect.isclass(found):
        retriever: Any = open_added("retrievers", name, found)
        if lacking := [each for each in ("info", "search", "grep", "read", "get") if not hasattr(retriever, each)]:
            raise UsageError(f"{name} is no retriever: it lacks {', '.join(lacking)}")
        made: Retriever = retriever
        return made
    if not callable(found):
        raise UsageError(f"{name} is no retriever: give a function of a query and a number, or a class")
    if config.env.has("grep"):
        raise ConfigError(_NO_GREP)
    return FunctionRetriever(found, digest(["own retriever", identity(name)]))


class FunctionRetriever:
    """Searches by a function. A document is one chunk; those that were found can be read."""

    def __init__(self, function: Callable[[str, int], Any], index_hash: str) -> None:
        self.info = IndexInfo(index_hash, "document", 0, 0)
        self._function = function
        self._known: dict[DocId, Chunk] = {}

    async def search(self, requests: Sequence[SearchRequest]) -> list[Found]:
        return [await self._search(request) for request in requests]

    async def grep(self, pattern: str, limit: int, deadline: float) -> RetrievalFault:
        return RetrievalFault(_NO_GREP)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...]:
        return (self._known[doc_id],) if doc_id in self._known else ()

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...]:
        return tuple(self._known[DocId(each)] for each in chunk_ids if DocId(each) in self._known)

    async def _search(self, request: SearchRequest) -> SearchResult:
        wanted = request.k + len(request.exclude)
        found = await call_added(self._function, request.query, wanted)
        hits: dict[DocId, Scored] = {}
        for rank, row in enumerate(found):
            if not isinstance(row, dict) or not isinstance(row.get("text"), str) or "id" not in row:
                raise TypeError(f"a retriever returns mappings with an id and a text, not {row!r:.100}")
            doc_id, score = DocId(str(row["id"])), float(row.get("score", -rank))
            if not math.isfinite(score):
                raise ValueError(f"a score is a finite number, not {score} (of {doc_id!r})")
            chunk = Chunk(ChunkId(doc_id), doc_id, 0, str(row.get("title") or ""), row["text"])
            self._known[doc_id] = chunk
            hits.setdefault(doc_id, Scored(chunk, score))
        kept = [hit for hit in hits.values() if hit.chunk.chunk_id not in request.exclude]
        return SearchResult(tuple(kept[: request.k]))
