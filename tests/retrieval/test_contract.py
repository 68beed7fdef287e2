"""What every `Retriever` must do, whatever is behind it. A test module subclasses `Contract` and says how one is made.

`EngineContract` adds what holds where the engine can go away while a reader is open.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from harness1 import config
from harness1.config import Config, Dense, Env, Machine, Rerank, Retrieval, load_config
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Document, chunk
from harness1.retrieval.engines.chroma import build_chroma, open_chroma
from harness1.retrieval.engines.milvus import build_milvus, open_milvus
from harness1.retrieval.index import open_index
from harness1.retrieval.models import open_embedder
from harness1.retrieval.open import _open, open_retriever, split_engine
from harness1.retrieval.protocol import BadPattern, RetrievalFault, Retriever, SearchRequest, SearchResult, total_order
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded
from harness1.retrieval.sharing import CachingRetriever
from tests.serving import serving

Make = Callable[[list[Document], config.Index], Retriever]
"""Builds an index of documents and opens it."""
PLAIN = [
    Document(DocId(f"doc{n}"), f"Report {n}", f"Common ground. Alpha{n} beta{n} gamma{n} delta{n} lie here.")
    for n in range(330)
]
QUOTED = Document(DocId('it\'s "quoted"'), "Quotes: ' \" `", "She said \"it's\" and 'no'; then \"); drop -- left.")
STRANGE = [
    Document(DocId("ærø/Straße 東京"), "Ærø «Straße»", "Die Fähre nach Ærø. 東京タワー и Москва, naïve café 🦊 עברית."),
    QUOTED,
    Document(DocId("lines"), "Line\ttabs", "First line\nsecond line\r\n\n\tfourth, and an end\n"),
    Document(DocId("back\\slash\\"), "C:\\temp\\new", 'A path C:\\temp\\new\\"x" ends in a backslash \\'),
    Document(DocId("100%_off"), "Sale 100%_off", "Now 100%_off and 50% more; under_score, not underXscore."),
    Document(DocId("looks_alike"), "Sale 100XYoff", "Nothing: 100XXoff, underXscore."),
    Document(DocId("control"), "Control", "before\0after \x01\x1f\x7f bells"),
    Document(DocId("twin-b"), "Twin", "Zebra quagga stripes in pairs."),
    Document(DocId("twin-a"), "Twin", "Zebra quagga stripes in pairs."),
    Document(DocId("wordless"), "", ""),
    Document(DocId("wide"), "Wide", ("xylophone marimba " * 120)[:2000]),
    Document(DocId("long"), "Long", " ".join(f"Sentence number s{n} of a long story." for n in range(200))),
]
DOCUMENTS = PLAIN[:165] + STRANGE + PLAIN[165:]
HOSTILE = [
    *("", " \t\n", "x" * 10_000, "common " * 1500, "\0\x01\x1f\x7f", "\ud800 half a pair", "'\"`´\\", "%"),
    *('") or chunk_id != ("', '{"$nin": ["doc1"]}', "'; DROP TABLE chunks; --", "common AND (alpha1 OR"),
    *("🦊" * 500, "עברית\u202e\u200d"),
]
"""Queries, ids and literals that mean something to somebody's parser."""
PATTERNS = [
    *("Common", "common", "(?i)COMMON", "(?i)ærø", "Straße", "東京.*🦊", "100%_off", "50% more", "under_score"),
    *(r"\bAlpha1[0-9]\b", r"Alpha3(?:10|20) beta", r"gamma12?3", r"delta4{2} lie", "^Report 7\nCommon", "^Common"),
    *("lie here.$", r"\ACommon|pairs\.$", "(?m)^second", r"line\r\n\n\tfourth", r"backslash \\$"),
    *("under.score", "after", "Sale 100", "", "no such text", "[[:alpha:]]+s19[0-9]", r"[]x]y[^]]l", r"\pL+タワー"),
    *map(re.escape, ('"it\'s" and', '"); drop --', "C:\\temp\\new")),
]


def content(piece: Chunk) -> str:
    """What grep looks at."""
    return f"{piece.title}\n{piece.text}"


def ids(result: SearchResult | RetrievalFault) -> list[str]:
    assert isinstance(result, SearchResult), result
    return [hit.chunk.chunk_id for hit in result.hits]


def search(retriever: Retriever, query: str, k: int = 10, exclude: list[str] | None = None) -> SearchResult:
    request = SearchRequest(query, k, frozenset(map(ChunkId, exclude or [])))
    (result,) = asyncio.run(retriever.search([request]))
    assert isinstance(result, SearchResult), result
    return result


class Contract:
    """A subclass gives the fixture `make`, and what is particular to its engine by attributes."""

    settings = config.Index()
    lexical = True
    """Whether a query finds nothing where no chunk has its words; engines with embeddings find neighbours."""
    own_order = True
    """Whether the order is made from scores here; a server that fuses lists has broken their ties in its own way."""

    @pytest.fixture(scope="class")
    @classmethod
    def make(cls) -> Make:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def retriever(cls, make: Make) -> Retriever:
        return make(DOCUMENTS, cls.settings)

    @property
    def chunks(self) -> list[Chunk]:
        """What the index holds, in corpus order."""
        return [piece for document in DOCUMENTS for piece in chunk(document, self.settings.chunk_tokens)]

    def test_an_index_says_what_it_holds(self, retriever: Retriever) -> None:
        info = retriever.info
        assert (info.unit, info.documents, info.chunks) == ("document", len(DOCUMENTS), len(self.chunks))

    def test_equal_corpora_have_equal_hashes_in_any_order(self, make: Make) -> None:
        few = DOCUMENTS[160:180]
        hashes = [make(documents, self.settings).info.index_hash for documents in (few, few[::-1], few[1:])]
        assert hashes[0] == hashes[1] != hashes[2]

    def test_words_that_one_chunk_alone_has_find_it_first(self, retriever: Retriever) -> None:
        for n in (0, 7, 164, 165, 329):
            assert ids(search(retriever, f"alpha{n} BETA{n} gamma{n} delta{n}"))[0] == f"doc{n}"

    def test_hits_are_totally_ordered_and_each_comes_once(self, retriever: Retriever) -> None:
        for query in ("common ground", "zebra quagga", "sale report 7", "sentence number s3"):
            result = search(retriever, query, 40)
            assert 0 < len(result.hits) <= 40
            assert len(set(ids(result))) == len(result.hits)
            scored = [(hit.chunk.chunk_id, hit.score) for hit in result.hits]
            assert total_order(scored[::-1]) == scored

    def test_equal_scores_are_ordered_by_id(self, retriever: Retriever) -> None:
        found = ids(search(retriever, "zebra quagga stripes", 2))
        assert (found if self.own_order else sorted(found)) == ["twin-a", "twin-b"]
        assert ids(search(retriever, "zebra quagga stripes", 1)) == found[:1]

    def test_at_most_k_hits_come_and_all_of_them_if_there_are_enough(self, retriever: Retriever) -> None:
        assert [len(search(retriever, "common ground", k).hits) for k in (1, 3, 50)] == [1, 3, 50]
        assert len(search(retriever, "common ground", 1000).hits) >= len(PLAIN)
        assert search(retriever, "common", 0).hits == ()

    def test_chunks_come_as_they_were_indexed(self, retriever: Retriever) -> None:
        expected = {piece.chunk_id: piece for piece in self.chunks}
        queries = ("ærø straße", "quotes said", "tabs second line", "path temp new", "sale 100", "bells", "xylophone")
        found = [hit.chunk for query in queries for hit in search(retriever, query, 3).hits]
        assert {document.doc_id for document in STRANGE[:7]} <= {hit.doc_id for hit in found}
        assert all(hit == expected[hit.chunk_id] for hit in found)

    def test_excluded_chunks_never_come_back_and_others_take_their_places(self, retriever: Retriever) -> None:
        best = ids(search(retriever, "common ground", 10))
        assert ids(search(retriever, "common ground", 10, [])) == best
        assert best[0] not in ids(search(retriever, "common ground", 10, best[:1]))
        others = ids(search(retriever, "common ground", 10, best))
        assert len(others) == 10
        assert not set(others) & set(best)
        many = [document.doc_id for document in PLAIN[:300]]
        left = ids(search(retriever, "common ground", 30, many))
        assert sorted(left) == sorted(document.doc_id for document in PLAIN[300:])

    def test_exclusions_that_are_no_ids_change_nothing(self, retriever: Retriever) -> None:
        best = ids(search(retriever, "common ground", 10))
        assert ids(search(retriever, "common ground", 10, [*HOSTILE, "unknown"])) == best
        odd = [document.doc_id for document in STRANGE]
        assert search(retriever, "quotes said", 1).hits[0].chunk.doc_id == QUOTED.doc_id
        assert not set(ids(search(retriever, "quotes said line path sale bells", 100, odd))) & set(odd)

    def test_words_that_nobody_has_find_nothing_where_words_count(self, retriever: Retriever) -> None:
        for query in ("unheardof wordlessness", "", "the of and", "q"):
            result = search(retriever, query)
            assert not (self.lexical and result.hits)

    def test_requests_are_answered_in_order_and_a_late_one_alone_fails(self, retriever: Retriever) -> None:
        few = [("alpha3 beta3 gamma3 delta3", 30.0), ("common", -1.0), ("alpha4 beta4 gamma4 delta4", 30.0)]
        requests = [SearchRequest(query, 1, deadline=deadline) for query, deadline in few]
        requests.append(SearchRequest("zebra quagga stripes", 1, frozenset({ChunkId("twin-a")})))
        first, late, *rest = asyncio.run(retriever.search(requests))
        assert isinstance(late, RetrievalFault)
        assert [ids(answer) for answer in (first, *rest)] == [["doc3"], ["doc4"], ["twin-b"]]
        assert asyncio.run(retriever.search([])) == []

    def test_equal_queries_have_equal_answers_together_and_alone(self, retriever: Retriever) -> None:
        queries = [f"common alpha{n % 5} beta{n % 5} report" for n in range(50)]

        async def together() -> list[list[SearchResult | RetrievalFault]]:
            return await asyncio.gather(*(retriever.search([SearchRequest(query, 7)]) for query in queries))

        alone = [search(retriever, query, 7).hits for query in queries]
        one_call = asyncio.run(retriever.search([SearchRequest(query, 7) for query in queries]))
        for each, (answer,), other in zip(alone, asyncio.run(together()), one_call, strict=True):
            assert isinstance(answer, SearchResult), answer
            assert isinstance(other, SearchResult), other
            assert each == answer.hits == other.hits

    def test_a_document_is_read_whole_and_in_order(self, retriever: Retriever) -> None:
        for document in [*STRANGE, PLAIN[329]]:
            expected = tuple(chunk(document, self.settings.chunk_tokens))
            assert asyncio.run(retriever.read(document.doc_id)) == expected
        for unknown in ("nobody", "long#0", "doc", *HOSTILE):
            assert asyncio.run(retriever.read(DocId(unknown))) == ()

    def test_chunks_are_got_in_the_order_asked_without_unknown_ones(self, retriever: Retriever) -> None:
        asked = [ChunkId(name) for name in ("twin-b", "nobody", "long#2", *HOSTILE, QUOTED.doc_id, "doc0", "long#0")]
        found = asyncio.run(retriever.get(asked))
        assert isinstance(found, tuple)
        assert [piece.chunk_id for piece in found] == ["twin-b", "long#2", QUOTED.doc_id, "doc0", "long#0"]
        assert asyncio.run(retriever.get([])) == ()

    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_grep_finds_the_first_matches_in_corpus_order(self, retriever: Retriever, pattern: str) -> None:
        # Python has neither \pL nor [:alpha:], and to it $ is also before a last line break.
        oracle = re.compile(pattern.replace(r"\pL", r"\w").replace("[:alpha:]", "a-zA-Z").replace("$", r"\Z"))
        expected = [piece for piece in self.chunks if oracle.search(content(piece))]
        for limit in (1, 5, 1000):
            found = asyncio.run(retriever.grep(pattern, limit, 30.0))
            assert isinstance(found, tuple), found
            assert found == tuple(expected[:limit])

    def test_grep_calls_a_bad_pattern_bad_and_a_late_one_late(self, retriever: Retriever) -> None:
        for pattern in ("(", "a(?=b)", r"(a)\1", "x{2000}", "\ud800"):
            assert isinstance(asyncio.run(retriever.grep(pattern, 5, 30.0)), BadPattern), pattern
        assert isinstance(asyncio.run(retriever.grep("Common", 5, -1.0)), RetrievalFault)

    @pytest.mark.parametrize("query", HOSTILE)
    def test_no_query_breaks_the_engine(self, retriever: Retriever, query: str) -> None:
        assert len(search(retriever, query, 5).hits) <= 5
        excluded = ids(search(retriever, query, 5))
        assert not set(ids(search(retriever, query, 5, excluded))) & set(excluded)
        if not re.search("[\ud800-\udfff]", query) and len(query) < 1000:
            found = asyncio.run(retriever.grep(re.escape(query), 1000, 30.0))
            assert isinstance(found, tuple), found
            assert len(found) == sum(query in content(piece) for piece in self.chunks)


class ChromaServer:
    """A Chroma server in a process of its own, over a folder; `url` answers until `stop`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        start = "import sys; from chromadb.cli.cli import app; sys.argv[0] = 'chroma'; app()"
        place = ["--path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        command, nowhere = [sys.executable, "-c", start, "run", *place], subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
        end = time.monotonic() + 30.0
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/api/v2/heartbeat", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.05)
        self.stop()
        raise RuntimeError("the Chroma server does not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def stop_milvus(path: Path) -> None:
    """End the server that pymilvus started in this process for a file of Milvus Lite."""
    from milvus_lite.server_manager import server_manager_instance

    server_manager_instance.release_server(str(path))


class EngineContract(Contract):
    """A subclass also gives the fixture `orphan`."""

    @pytest.fixture
    def orphan(self, make: Make) -> Retriever:
        """A retriever that was opened over DOCUMENTS[:20], and whose engine is gone since; calls wait a second."""
        raise NotImplementedError

    def test_without_the_engine_every_answer_is_a_fault(self, orphan: Retriever) -> None:
        answers = asyncio.run(orphan.search([SearchRequest(query, 5, deadline=1.0) for query in ("common", "")]))
        calls = orphan.grep("Common", 5, 1.0), orphan.read(DocId("doc1")), orphan.get([ChunkId("doc1")])
        answers += map(asyncio.run, calls)
        assert [type(answer) for answer in answers] == [RetrievalFault] * 5


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
