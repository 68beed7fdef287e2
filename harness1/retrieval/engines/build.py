"""Building an index in another engine."""

from __future__ import annotations

from collections.abc import Iterable

from harness1 import config
from harness1.errors import UsageError
from harness1.redaction import without_password
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.chroma import build_chroma
from harness1.retrieval.engines.milvus_build import build_milvus
from harness1.retrieval.protocol import IndexInfo

BUILDERS = {"milvus": build_milvus, "chroma": build_chroma}


def build_engine(
    spec: str, documents: Iterable[Document], settings: config.Index, machine: config.Machine
) -> IndexInfo:
    """Build an index of a corpus in the engine at `ENGINE:ADDRESS`.

    Raises:
        UsageError: there is no such engine; see also `build_milvus` and `build_chroma`.
    """
    name, colon, address = spec.partition(":")
    if not colon or name not in BUILDERS:
        known = "milvus:PATH.db, milvus:http://HOST:19530, chroma:http://HOST:8000"
        raise UsageError(f"--engine {without_password(spec)}: give one of {known}, each with or without #COLLECTION")
    return BUILDERS[name](documents, address, settings, machine)
