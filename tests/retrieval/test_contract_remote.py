"""The contract of `Retriever` over the wire: an embedded index behind a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from harness1 import config
from harness1.config import Config, Dense, load_config
from harness1.retrieval.build import build_index
from harness1.retrieval.open import _open, open_retriever, split_engine
from harness1.retrieval.protocol import Retriever
from tests.retrieval.contract import DOCUMENTS, EngineContract, Make
from tests.serving import serving

pytestmark = pytest.mark.service

QUICK = load_config(None, ["machine.call_deadline_s=5.0"])


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
