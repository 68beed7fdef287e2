from collections.abc import Iterator

import pytest

from harness1 import config
from harness1.config import Config, Dense, Machine
from harness1.retrieval.engines.chroma import build_chroma, open_chroma
from harness1.retrieval.protocol import Retriever
from tests.retrieval.chroma_server import ChromaServer
from tests.retrieval.contract import DOCUMENTS, EngineContract, Make

pytestmark = pytest.mark.service


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
