"""Opens a retriever from what a user typed. To add an engine, write one file, a prefix and a case here; a plugin names
an `Opener` in `harness1.retrievers`; `FILE.py:NAME` is a function or class of one's own (`retrieval/own.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness1.config import Config
from harness1.errors import UsageError
from harness1.plugins import find_plugin, is_own, plugin_names, whole_name
from harness1.redaction import is_redacted
from harness1.retrieval.protocol import Retriever
from harness1.retrieval.result_cache import CachingRetriever

ENGINES = frozenset({"http", "https", "milvus", "chroma", "web"})
"""Prefixes of specs that name no folder."""
Opener = Callable[[str, Config], Retriever]
"""Opens the engine of another package by what follows its prefix."""


def open_retriever(spec: str, config: Config = Config()) -> Retriever:
    """Open an index folder, an engine by `PREFIX:REST` for one of `ENGINES` or of another package, such as
    `http://HOST:8000`, or a function or class of one's own as `FILE.py:NAME`.

    Equal searches are answered from a cache of `machine.cached_searches` results. Deadlines are in seconds; scores are
    the engine's own.

    Raises:
        UsageError: the address is one that was recorded without its secrets, or the engine is another package's, and
            has the name of another or cannot be imported.
        CorpusError: the folder is not an index.
        SchemaError: the index was made by a newer version of the package.
        ConfigError: the settings ask for a feature that the engine lacks.
        MissingExtra: a package that the engine needs is not installed.
        InfrastructureFault: the engine is a server that does not answer.
    """
    prefix, rest = engine_of(spec)
    if prefix is not None and is_redacted(spec):
        raise UsageError(f"{spec} was recorded without its password or key: give the whole address with --index")
    retriever = _opened(prefix, rest, config)
    size = config.machine.cached_searches
    return CachingRetriever(retriever, size, config.env.retrieval) if size else retriever


def is_engine(spec: str) -> bool:
    """Return whether a spec names an engine by its prefix, and not a folder by its path."""
    return engine_of(spec)[0] is not None


def is_exclusive(spec: str) -> bool:
    """Return whether only one process at a time can open what a spec names, such as a Milvus Lite file."""
    prefix, rest = engine_of(spec)
    return prefix == "milvus" and not rest.startswith(("http://", "https://"))


def engine_of(spec: str) -> tuple[str | None, str]:
    """Return the prefix of an engine and what follows it; None and the whole spec if it is the path of a folder. One's
    own `FILE.py:NAME` is all prefix."""
    if is_own(spec):
        return spec, ""
    prefix, colon, rest = spec.partition(":")
    known = bool(colon) and (prefix in ENGINES or prefix in plugin_names("retrievers"))
    return (prefix, rest) if known else (None, spec)


def _opened(prefix: str | None, rest: str, config: Config) -> Retriever:
    if prefix is not None and is_own(prefix):
        from harness1.retrieval.own import open_own

        return open_own(prefix, config)
    added: Opener | None = find_plugin("retrievers", prefix, ENGINES) if prefix else None
    if added is not None:
        return added(rest, config)
    match prefix:
        case None:
            from harness1.retrieval.index.retriever import open_embedded

            return open_embedded(Path(rest), config)
        case "milvus":
            from harness1.retrieval.engines.milvus import open_milvus

            return open_milvus(rest, config)
        case "chroma":
            from harness1.retrieval.engines.chroma import open_chroma

            return open_chroma(rest, config)
        case "web":
            from harness1.retrieval.engines.web import open_web

            return open_web(rest, config)
        case _:
            from harness1.retrieval.engines.remote import open_http

            return open_http(f"{prefix}:{rest}", config)


def absolute_index(index: str) -> str:
    """Return an index folder by its whole path, so that the run can be replayed from anywhere; an engine stays as
    named."""
    return whole_name(index) if is_engine(index) else str(Path(index).resolve())
