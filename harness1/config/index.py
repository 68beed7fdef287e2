"""`[index]`: chunking, analysis and embedding of a corpus. It is in `index_hash`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from harness1.errors import ConfigError
from harness1.settings import Count, Positive, Settings, Share
from harness1.words import AUTO, NONE, languages


class Dense(Settings):
    """Embeddings of an index's chunks, stored beside their terms."""

    model: str = ""
    """A name or local folder for sentence-transformers, or `hash:DIMENSIONS` (needs no model); empty: no embeddings."""
    search: Literal["exact", "hnsw", "ivf"] = "exact"
    """Exact search suits up to about a million chunks; the approximate graphs and lists of faiss, larger numbers."""
    query_prefix: str = ""
    """Text put before a query, if the model was trained that way (`query: `)."""
    document_prefix: str = ""
    """The same before a text (`passage: `)."""
    hnsw_links: Positive = 32
    """Links of each vector in a graph: more find more and take more memory."""
    hnsw_build: Positive = 200
    """Candidates compared for each vector while a graph is built: more find more and take longer."""
    hnsw_search: Positive = 128
    """Candidates kept while a graph is searched: more find more and take longer."""
    ivf_lists: Count = 0
    """0: 4 times the square root of the number of vectors."""
    ivf_probes: Positive = 32
    """Lists that a search reads: more find more and take longer."""


class Index(Settings):
    """The chunking and analysis of a corpus. It is in `index_hash`."""

    unit: Literal["document", "chunk"] = "document"
    """What is pooled, curated and scored: whole documents, or chunks where the gold names chunks."""
    chunk_tokens: Positive = 512
    """Documents longer than this (characters / 4) are cut at sentence boundaries; shorter ones stay whole."""
    k1: Annotated[float, Meta(ge=0.0)] = 1.2
    """BM25's saturation, without a unit: how much a term's further occurrences still add; 0: nothing."""
    b: Share = 0.75
    """BM25's share of normalisation by length: 0 none, 1 full."""
    language: str = AUTO
    """The language that words are stemmed in: one of Snowball's, such as `german`, or `none`. `auto` is `english` where
    less than 1 % of the chunks are mostly in another script than Latin; else each word is stemmed by its script."""
    dense: Dense = Dense()

    def __post_init__(self) -> None:
        if self.language not in (AUTO, NONE) and self.language not in (known := languages()):
            raise ConfigError(f"index.language={self.language}: give one of {', '.join((AUTO, NONE, *known))}")

    def hashed(self) -> dict[str, Any]:
        """Return the settings that enter hashes: all, but the language only where one is named, because earlier hashes
        were made without."""
        tree: dict[str, Any] = msgspec.to_builtins(self)
        if self.language == AUTO:
            del tree["language"]
        return tree
