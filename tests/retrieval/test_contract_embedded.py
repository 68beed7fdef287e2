import pytest

from harness1 import config
from harness1.config import Config, Dense
from harness1.retrieval.building import build_index
from harness1.retrieval.embedded import open_embedded
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
