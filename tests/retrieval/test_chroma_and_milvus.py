"""Builds that end early, and damage, trouble and limits of indexes in Chroma and in Milvus."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness1.config import Config, Dense, Env, Index, Machine, Rerank, Retrieval
from harness1.errors import ConfigError, CorpusError, InfrastructureFault, UsageError
from harness1.records import DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines import chroma, milvus
from harness1.retrieval.engines.engine import parse_address
from harness1.retrieval.open import build_engine, open_retriever
from harness1.retrieval.protocol import IndexInfo, RetrievalFault, Retriever, SearchRequest, SearchResult
from tests.retrieval.test_contract import ChromaServer, stop_milvus
from tests.support import Ask, Reply, replying

pytestmark = pytest.mark.service

DOCUMENTS = [Document(DocId(f"d{n}"), f"Title {n}", f"Common words and alpha{n} beta{n}.") for n in range(60)]
HASHED = Index(dense=Dense(model="hash:256"))
GRAPH = Index(dense=Dense(model="hash:256", search="hnsw"))
JSON = {"content-type": "application/json"}


def settings(**retrieval: Any) -> Config:
    return Config(env=Env(retrieval=Retrieval(**retrieval)))


def found(retriever: Retriever, query: str, k: int = 5) -> list[str]:
    (answer,) = asyncio.run(retriever.search([SearchRequest(query, k)]))
    assert isinstance(answer, SearchResult), answer
    return [hit.chunk.doc_id for hit in answer.hits]


def interrupted() -> Iterator[Document]:
    yield from DOCUMENTS
    raise KeyboardInterrupt


class ChromaPlace:
    """A Chroma server in which indexes have names."""

    name, settings = "chroma", GRAPH

    def __init__(self, url: str) -> None:
        self.url = url

    def build(self, documents: Iterable[Document], name: str, settings: Index | None = None) -> IndexInfo:
        return build_engine(f"{self.name}:{self.url}#{name}", documents, settings or self.settings, Machine())

    def open(self, name: str, config: Config = Config()) -> Retriever:
        return open_retriever(f"{self.name}:{self.url}#{name}", config)

    @property
    def client(self) -> Any:
        return chroma.connect(parse_address("chroma", self.url), 5.0)

    def collections(self, name: str) -> list[str]:
        return [each.name for each in self.client.list_collections() if each.name.startswith(name)]

    def lose(self, name: str, chunk: str) -> None:
        self.client.get_collection(name, embedding_function=None).delete(ids=[chunk])

    def make_foreign(self, name: str) -> None:
        self.client.create_collection(name, embedding_function=None)


class MilvusPlace(ChromaPlace):
    """A file of Milvus Lite."""

    name, settings = "milvus", Index()

    @property
    def client(self) -> Any:
        return milvus.connect(parse_address("milvus", self.url), 5.0)

    def collections(self, name: str) -> list[str]:
        return [each for each in self.client.list_collections() if each.startswith(name)]

    def lose(self, name: str, chunk: str) -> None:
        self.client.delete(*self.collections(name), ids=[chunk])

    def make_foreign(self, name: str) -> None:
        self.client.create_collection(name, dimension=4)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ChromaServer]:
    made = ChromaServer(tmp_path_factory.mktemp("chroma"))
    yield made
    made.stop()


@pytest.fixture
def file(tmp_path) -> Iterator[MilvusPlace]:
    yield MilvusPlace(str(tmp_path / "lite.db"))
    stop_milvus(tmp_path / "lite.db")


@pytest.fixture(params=["chroma", "milvus"])
def place(request) -> ChromaPlace:
    if request.param == "chroma":
        return ChromaPlace(request.getfixturevalue("server").url)
    made: MilvusPlace = request.getfixturevalue("file")
    return made


def test_an_interrupted_build_leaves_the_earlier_index_and_the_next_one_cleans_up(place) -> None:
    with pytest.raises(KeyboardInterrupt):
        place.build(interrupted(), "interrupted")
    with pytest.raises(CorpusError, match="no finished index"):
        place.open("interrupted")
    info = place.build(DOCUMENTS[:50], "interrupted")
    with pytest.raises(KeyboardInterrupt):
        place.build(interrupted(), "interrupted")
    assert len(place.collections("interrupted")) == 2
    retriever = place.open("interrupted")
    assert retriever.info == info
    assert found(retriever, "alpha7 beta7")[0] == "d7"
    place.build(DOCUMENTS[:50], "interrupted")
    assert len(place.collections("interrupted")) == 1


def test_an_open_reader_never_sees_another_index(place) -> None:
    place.build(DOCUMENTS, "replaced")
    retriever = place.open("replaced")
    place.build(DOCUMENTS[10:], "replaced", GRAPH)
    (answer,) = asyncio.run(retriever.search([SearchRequest("alpha7", 5, deadline=5.0)]))
    assert isinstance(answer, RetrievalFault)
    assert found(place.open("replaced"), "alpha17 beta17")[0] == "d17"


def test_an_index_that_lost_chunks_or_is_none_is_not_opened_and_what_is_foreign_is_left_alone(place) -> None:
    place.build(DOCUMENTS, "damaged")
    place.lose("damaged", "d3")
    with pytest.raises(CorpusError, match="59 chunks instead of 60"):
        place.open("damaged")
    place.make_foreign("foreign")
    with pytest.raises(CorpusError, match=r"not an index of harness1|no finished index"):
        place.open("foreign")
    with pytest.raises(UsageError, match=r"name another #COLLECTION|not made by harness1"):
        place.build(DOCUMENTS, "foreign")
    assert place.collections("foreign") == ["foreign"]


def test_grep_is_narrowed_by_the_server(place, monkeypatch) -> None:
    place.build(DOCUMENTS[::-1], "grep")
    retriever: Any = place.open("grep")
    engine, sent = retriever._inner._engine, []
    stretch = engine.stretch
    monkeypatch.setattr(engine, "stretch", lambda *arguments: sent.append(stretch(*arguments)) or sent[-1])
    chunks = asyncio.run(retriever.grep(r"alpha5\d beta5[12]", 5, 5.0))
    assert [chunk.doc_id for chunk in chunks] == ["d52", "d51"]
    assert list(map(len, sent)) == [11]


def test_what_an_engine_cannot_do_is_refused(place, server) -> None:
    place.build(DOCUMENTS, "plain")
    for mode in ("hybrid", "bm25" if place.name == "chroma" else "dense"):
        with pytest.raises(ConfigError, match=r"no BM25|index\.dense\.model"):
            place.open("plain", settings(mode=mode))
    with pytest.raises(ConfigError, match="rerank"):
        place.open("plain", settings(rerank=Rerank(on=True)))
    with pytest.raises(ConfigError, match=r"index\.dense\.model"):
        chroma.build_chroma(DOCUMENTS, server.url, Index(), Machine())
    with pytest.raises(ConfigError, match="HNSW, not exact"):
        chroma.build_chroma(DOCUMENTS, server.url, HASHED, Machine())


def test_an_engine_that_is_not_there_is_named(tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for prefix in ("chroma", "milvus"):
            url = f"{prefix}:http://127.0.0.1:{free.getsockname()[1]}"
            with pytest.raises(InfrastructureFault):
                open_retriever(url, Config(machine=Machine(call_deadline_s=1.0)))
    with pytest.raises(CorpusError, match="does not exist"):
        open_retriever(f"milvus:{tmp_path}/absent.db", Config())
    assert not (tmp_path / "absent.db").exists()
    assert "secret" not in str(parse_address("milvus", "http://user:my@secret@host:19530#x"))
    for spec in ("qdrant:http://user:secret@host", "milvus", str(tmp_path)):
        with pytest.raises(UsageError, match="milvus:PATH") as error:
            build_engine(spec, DOCUMENTS, Index(), Machine())
        assert "secret" not in str(error.value)


def test_a_build_that_ends_before_the_new_index_has_its_name_loses_nothing(server, monkeypatch) -> None:
    from chromadb import Collection

    def killed(*arguments: object, name: str | None = None, **options: object) -> None:
        if name is not None:
            raise KeyboardInterrupt
        modify(*arguments, **options)

    place, modify = ChromaPlace(server.url), Collection.modify
    place.build(DOCUMENTS[:30], "unnamed")
    with monkeypatch.context() as patch:
        patch.setattr(Collection, "modify", killed)
        with pytest.raises(KeyboardInterrupt):
            place.build(DOCUMENTS, "unnamed")
    retriever = place.open("unnamed")
    assert retriever.info.documents == len(DOCUMENTS)
    with pytest.raises(KeyboardInterrupt):
        place.build(interrupted(), "unnamed")
    assert place.open("unnamed").info == retriever.info
    assert found(retriever, "alpha47 beta47")[0] == "d47"
    assert place.build(DOCUMENTS[:30], "unnamed") == place.open("unnamed").info
    with chroma._if_there():  # what another build removed meanwhile is no failure
        place.client.delete_collection("absent")


SILENCE_S = 3.0


@pytest.mark.parametrize("mode", ["500", "404", "429", "nonsense", "silent"])
def test_whatever_goes_wrong_on_the_way_is_a_fault_and_holds_no_thread(server, mode: str) -> None:
    modes = ["pass"]

    def pass_on(ask: Ask) -> Reply:
        if modes[-1] == "pass":
            passed = httpx.request(ask.method, server.url + ask.path, content=ask.body, headers=JSON)
            return passed.status_code, {}, passed.content
        if modes[-1] == "silent":
            time.sleep(SILENCE_S)
        return int(modes[-1]) if modes[-1].isdecimal() else 200, {}, b"<html>nonsense"

    ChromaPlace(server.url).build(DOCUMENTS, "proxied")
    quick = Config(machine=Machine(call_deadline_s=1.0, concurrency=1))
    with replying(pass_on) as url:
        retriever = chroma.open_chroma(f"{url}#proxied", quick)
        assert found(retriever, "alpha7 beta7")[0] == "d7"
        modes.append(mode)
        begin = time.monotonic()
        answers = [
            *asyncio.run(retriever.search([SearchRequest("alpha7", 5, deadline=0.5)])),
            asyncio.run(retriever.grep("alpha7", 5, 0.5)),
            asyncio.run(retriever.read(DocId("d7"))),
        ]
        assert [type(answer) for answer in answers] == [RetrievalFault] * 3
        assert time.monotonic() - begin < SILENCE_S
        with pytest.raises(InfrastructureFault):
            chroma.open_chroma(f"{url}#proxied", quick)
        modes.append("pass")
        (answer,) = asyncio.run(retriever.search([SearchRequest("alpha7 beta7", 1, deadline=SILENCE_S - 1.0)]))
        assert isinstance(answer, SearchResult)


def test_two_indexes_share_a_file_and_what_is_no_index_is_named_before_it_is_loaded(file, monkeypatch) -> None:
    file.build(DOCUMENTS[:30], "one")
    file.build(DOCUMENTS[30:], "two")
    file.make_foreign("one__mine")
    file.build(DOCUMENTS[:20], "one")
    assert "one__mine" in file.collections("one")
    assert found(file.open("two"), "alpha40") == ["d40"]
    assert found(file.open("one"), "alpha25") == []
    file.client.create_collection("bare", schema=milvus._schema(None))
    file.client.create_alias("bare", "odd")
    monkeypatch.setattr("pymilvus.MilvusClient.load_collection", None)
    with pytest.raises(CorpusError, match="not an index of harness1"):
        file.open("odd")


@pytest.mark.parametrize("search", ["exact", "hnsw"])
def test_dense_indexes_of_every_kind_find_near_texts(file, search: str) -> None:
    file.build(DOCUMENTS, "dense", Index(dense=Dense(model="hash:256", search=search)))
    for mode in ("dense", "hybrid", "auto"):
        assert found(file.open("dense", settings(mode=mode)), "alpha7 beta7")[0] == "d7"


def test_the_mode_decides_whether_words_or_neighbours_are_found(file, monkeypatch) -> None:
    file.build(DOCUMENTS, "x", HASHED)
    assert found(file.open("x", settings(mode="bm25")), "alpha7") == ["d7"]
    assert len(found(file.open("x", settings(mode="dense")), "alpha7")) == 5
    both = found(file.open("x"), "common words alpha7", 40)
    assert len(both) == 40
    monkeypatch.setattr("harness1.retrieval.engines.milvus.BM25_DEPTH", 1)
    monkeypatch.setattr("harness1.retrieval.engines.milvus.DENSE_DEPTH", 1)
    assert found(file.open("x"), "common words alpha7", 40) == both, "the depth of a list never falls below k"


def test_a_chunk_too_long_for_milvus_is_named(file) -> None:
    long = Document(DocId("long"), "Title", "word " * 20_000)
    with pytest.raises(CorpusError, match=r"'long'.*index\.chunk_tokens"):
        file.build([long], "x", Index(chunk_tokens=50_000))


def test_a_file_that_another_process_has_open_is_refused(file) -> None:
    file.build(DOCUMENTS, "x")
    stop_milvus(Path(file.url))
    hold = (
        "import sys; from milvus_lite.db import MilvusLite; db = MilvusLite(sys.argv[1]); print(1, flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold, file.url], stdin=pipe, stdout=pipe) as holder:
        holder.stdout.readline()
        with pytest.raises(UsageError, match="one process at a time"):
            file.open("x")
        holder.kill()
    assert file.open("x").info.chunks == 60


def test_pairs_of_characters_are_terms_and_a_language_is_stemmed_as_in_an_index_folder(file) -> None:
    texts = {"東京タワー": "1958年に完成した。設計者は内藤多仲である。", "京都": "古い都である。"}
    info = file.build([Document(DocId(title), title, text) for title, text in texts.items()], "japanese")
    retriever = file.open("japanese")
    assert retriever.info == info
    assert info.language == "auto"
    assert found(retriever, "設計者は誰") == ["東京タワー"]
    assert sorted(found(retriever, "京")) == ["京都", "東京タワー"]
    signs = [Document(DocId(name), "", f"It is {name}.") for name in ("C++", "C#", "2.14.3", "14")]
    file.build(signs, "signs")
    assert [found(file.open("signs"), sign)[0] for sign in ("C++", "C#", "2.14.3")] == ["C++", "C#", "2.14.3"]
    german = [Document(DocId("a"), "", "Die Häuser der Stadt"), Document(DocId("b"), "", "Ein Buch")]
    assert file.build(german, "german", Index(language="german")).language == "german"
    assert found(file.open("german"), "Haus") == ["a"]
