"""The contract of `Retriever` over the wire: an embedded index behind a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from harness1 import config
from harness1.config import Config, Dense, load_config
from harness1.retrieval.build import build_index
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import Retriever
from tests.retrieval.contract import DOCUMENTS, EngineContract, Make
from tests.serving import serving

pytestmark = pytest.mark.service

UNCACHED = load_config(None, ["machine.cached_searches=0", "machine.call_deadline_s=5.0"])


class TestRemote(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory) -> Iterator[Make]:
        with ExitStack() as servers:

            def make(documents, settings: config.Index) -> Retriever:
                folder = tmp_path_factory.mktemp("index")
                build_index(documents, folder, settings)
                served = open_retriever(str(folder), Config())
                return open_retriever(servers.enter_context(serving(served)), UNCACHED)

            yield make

    @pytest.fixture
    def orphan(self, tmp_path) -> Retriever:
        build_index(DOCUMENTS[:20], tmp_path, self.settings)
        with serving(open_retriever(str(tmp_path), Config())) as url:
            return open_retriever(url, UNCACHED)


class TestRemoteHybrid(TestRemote):
    settings = config.Index(dense=Dense(model="hash:64"))
    lexical = False
