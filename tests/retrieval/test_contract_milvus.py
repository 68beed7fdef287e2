from collections.abc import Iterator
from pathlib import Path

import pytest

from harness1 import config
from harness1.config import Config, Dense, Env, Machine, Retrieval
from harness1.retrieval.engines.milvus import build_milvus, open_milvus
from harness1.retrieval.protocol import Retriever
from tests.retrieval.contract import DOCUMENTS, EngineContract, Make

pytestmark = pytest.mark.service


def stop(path: Path) -> None:
    """End the server that pymilvus started in this process for a file of Milvus Lite."""
    from milvus_lite.server_manager import server_manager_instance

    server_manager_instance.release_server(str(path))


class MilvusContract(EngineContract):
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
        stop(path)

    @pytest.fixture
    def orphan(self, tmp_path) -> Retriever:
        path = tmp_path / "lite.db"
        build_milvus(DOCUMENTS[:20], str(path), self.settings, Machine())
        settings = Config(env=Env(retrieval=Retrieval(mode=self.mode)), machine=Machine(call_deadline_s=1.0))
        retriever = open_milvus(str(path), settings)
        stop(path)
        return retriever


class TestMilvusBM25(MilvusContract):
    pass


class TestMilvusDense(MilvusContract):
    settings = config.Index(dense=Dense(model="hash:4096"))
    lexical = False
    mode = "dense"


class TestMilvusHybrid(MilvusContract):
    settings = config.Index(dense=Dense(model="hash:4096"))
    lexical = False
    own_order = False
