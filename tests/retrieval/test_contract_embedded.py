import numpy as np
import pytest

from harness1 import config
from harness1.config import Config, Dense, Rerank, Retrieval
from harness1.retrieval.build import build_index
from harness1.retrieval.embedder import open_embedder
from harness1.retrieval.index import open_index
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded
from harness1.retrieval.sharing import CachingRetriever
from tests.retrieval.contract import Contract, Make


class TestEmbeddedBM25(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Make:
        def made(documents, settings):
            folder = tmp_path_factory.mktemp("index")
            build_index(documents, folder, settings)
            return open_embedded(folder, Config())

        return made


class TestEmbeddedHybrid(TestEmbeddedBM25):
    settings = config.Index(dense=Dense(model="hash:4096"))
    lexical = False


class TestEmbeddedCached(Contract):
    """Small, so that results are dropped and asked for again."""

    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Make:
        def made(documents, settings):
            folder = tmp_path_factory.mktemp("index")
            build_index(documents, folder, settings)
            return CachingRetriever(open_embedded(folder, Config()), 20, "")

        return made


class SharedWords:
    """A reranker: the share of the words of a query that a text has."""

    hash = "shared words"

    def score(self, pairs) -> np.ndarray:
        words = [(query.lower().split(), set(text.lower().replace(".", " ").split())) for query, text in pairs]
        shares = [sum(word in text for word in query) / (len(query) + 1) for query, text in words]
        return np.array(shares, dtype=np.float32)


class TestEmbeddedReranked(Contract):
    settings = config.Index(dense=Dense(model="hash:4096"))
    lexical = False

    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Make:
        def made(documents, settings):
            folder = tmp_path_factory.mktemp("index")
            build_index(documents, folder, settings)
            ranking, run = Retrieval(rerank=Rerank(on=True)), Config().machine
            embedder = open_embedder(settings.dense, run)
            return EmbeddedRetriever(open_index(folder), ranking, run, embedder, SharedWords())

        return made
