"""Opening a retriever by what a user typed. Adding an engine is one file and one line here."""

from __future__ import annotations

from pathlib import Path

from harness1.retrieval.embedded import EmbeddedRetriever
from harness1.retrieval.index import open_index
from harness1.retrieval.retriever import Retriever


def open_retriever(spec: str) -> Retriever:
    """Open the folder of an embedded index.

    Raises:
        CorpusError: the folder is no index.
        SchemaError: the index was made by a newer version of the package.
    """
    return EmbeddedRetriever(open_index(Path(spec)))
