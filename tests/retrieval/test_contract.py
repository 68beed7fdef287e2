"""Every retriever keeps the contract: the embedded index, Chroma, Milvus, and an index behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from harness1 import config
from harness1.config import Config, Dense, Env, Machine, Rerank, Retrieval, load_config
from harness1.retrieval.build import build_index
from harness1.retrieval.engines.chroma import build_chroma, open_chroma
from harness1.retrieval.engines.milvus import build_milvus, open_milvus
from harness1.retrieval.index import open_index
from harness1.retrieval.models import open_embedder
from harness1.retrieval.open import _open, open_retriever, split_engine
from harness1.retrieval.protocol import Retriever
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded
from harness1.retrieval.sharing import CachingRetriever
from tests.retrieval.contract import DOCUMENTS, ChromaServer, Contract, EngineContract, Make, stop_milvus
from tests.serving import serving

HASHED = config.Index(dense=Dense(model="hash:4096"))
QUICK = load_config(None, ["machine.call_deadline_s=5.0"])


class TestEmbeddedBM25(Contract):
    @staticmethod
    def open(folder: Path, settings: config.Index) -> Retriever:
        return open_embedded(folder, Config())

    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Make:
        def made(documents, settings):
            folder = tmp_path_factory.mktemp("index")
            build_index(documents, folder, settings)
            return cls.open(folder, settings)

        return made


class TestEmbeddedHybrid(TestEmbeddedBM25):
    settings = HASHED
    lexical = False


class TestEmbeddedCached(TestEmbeddedBM25):
    @staticmethod
    def open(folder: Path, settings: config.Index) -> Retriever:
        """Small, so that results are dropped and asked for again."""
        return CachingRetriever(open_embedded(folder, Config()), 20, "")


class SharedWords:
    """A reranker: the share of the words of a query that a text has."""

    hash = "shared words"

    def score(self, pairs) -> np.ndarray:
        words = [(query.lower().split(), set(text.lower().replace(".", " ").split())) for query, text in pairs]
        shares = [sum(word in text for word in query) / (len(query) + 1) for query, text in words]
        return np.array(shares, dtype=np.float32)


class TestEmbeddedReranked(TestEmbeddedHybrid):
    @staticmethod
    def open(folder: Path, settings: config.Index) -> Retriever:
        ranking, embedder = Retrieval(rerank=Rerank(on=True)), open_embedder(settings.dense, Machine())
        return EmbeddedRetriever(open_index(folder), ranking, embedder, SharedWords())


@pytest.mark.service
class TestChroma(EngineContract):
    # So many links, and a search so wide, that the graph of a small corpus misses nothing: the server builds it in
    # several threads, and a narrower search misses a chunk in one graph of five.
    settings = config.Index(dense=Dense(model="hash:4096", search="hnsw"))
    lexical = False

    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Iterator[Make]:
        server = ChromaServer(tmp_path_factory.mktemp("chroma"))
        made: list[str] = []

        def make(documents, settings: config.Index) -> Retriever:
            made.append(f"{server.url}#index{len(made)}")
            build_chroma(documents, made[-1], settings, Machine())
            return open_chroma(made[-1], Config())

        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("HNSW_LINKS", 96), ("HNSW_BUILD", 400), ("HNSW_SEARCH", 512)):
                patch.setattr(f"harness1.retrieval.engines.chroma.{name}", value)
            yield make
        server.stop()

    @pytest.fixture
    def orphan(self, tmp_path) -> Retriever:
        server = ChromaServer(tmp_path)
        build_chroma(DOCUMENTS[:20], server.url, self.settings, Machine())
        retriever = open_chroma(server.url, Config(machine=Machine(call_deadline_s=1.0)))
        server.stop()
        return retriever


@pytest.mark.service
class TestMilvusBM25(EngineContract):
    mode = "auto"

    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Iterator[Make]:
        path = tmp_path_factory.mktemp("milvus") / "lite.db"
        made: list[str] = []

        def make(documents, settings: config.Index) -> Retriever:
            made.append(f"{path}#index{len(made)}")
            build_milvus(documents, made[-1], settings, Machine())
            return open_milvus(made[-1], Config(env=Env(retrieval=Retrieval(mode=cls.mode))))

        yield make
        stop_milvus(path)

    @pytest.fixture
    def orphan(self, tmp_path) -> Retriever:
        path = tmp_path / "lite.db"
        build_milvus(DOCUMENTS[:20], str(path), self.settings, Machine())
        settings = Config(env=Env(retrieval=Retrieval(mode=self.mode)), machine=Machine(call_deadline_s=1.0))
        retriever = open_milvus(str(path), settings)
        stop_milvus(path)
        return retriever


class TestMilvusDense(TestMilvusBM25):
    settings = HASHED
    lexical = False
    mode = "dense"


class TestMilvusHybrid(TestMilvusBM25):
    settings = HASHED
    lexical = False
    own_order = False


@pytest.mark.service
class TestRemote(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Iterator[Make]:
        with ExitStack() as servers:

            def make(documents, settings: config.Index) -> Retriever:
                folder = tmp_path_factory.mktemp("index")
                build_index(documents, folder, settings)
                served = open_retriever(str(folder), Config())
                return _open(*split_engine(servers.enter_context(serving(served))), QUICK)

            yield make

    @pytest.fixture
    def orphan(self, tmp_path) -> Retriever:
        build_index(DOCUMENTS[:20], tmp_path, self.settings)
        with serving(open_retriever(str(tmp_path), Config())) as url:
            return open_retriever(url, QUICK)


class TestRemoteHybrid(TestRemote):
    settings = config.Index(dense=Dense(model="hash:64"))
    lexical = False
