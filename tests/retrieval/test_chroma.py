import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness1 import config
from harness1.config import Config, Dense, Env, Machine, Rerank, Retrieval
from harness1.errors import ConfigError, CorpusError, InfrastructureFault, UsageError
from harness1.records import ChunkId, DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.chroma import build_chroma, connect, open_chroma, parse_address
from harness1.retrieval.open import build_engine
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest, SearchResult
from tests.retrieval.chroma_server import ChromaServer

pytestmark = pytest.mark.service

DOCUMENTS = [Document(DocId(f"d{n}"), f"Title {n}", f"Common words and alpha{n} beta{n}.") for n in range(60)]
HASHED = config.Index(dense=Dense(model="hash:256", search="hnsw"))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ChromaServer]:
    made = ChromaServer(tmp_path_factory.mktemp("chroma"))
    yield made
    made.stop()


def found(retriever: Retriever, query: str, k: int = 5) -> list[str]:
    (answer,) = asyncio.run(retriever.search([SearchRequest(query, k)]))
    assert isinstance(answer, SearchResult), answer
    return [hit.chunk.doc_id for hit in answer.hits]


def test_an_interrupted_build_leaves_the_earlier_index_and_the_next_one_cleans_up(server) -> None:
    def broken():
        yield from DOCUMENTS
        raise KeyboardInterrupt

    url = f"{server.url}#interrupted"
    with pytest.raises(KeyboardInterrupt):
        build_chroma(broken(), url, HASHED, Machine())
    with pytest.raises(CorpusError, match="no finished index"):
        open_chroma(url, Config())
    info = build_chroma(DOCUMENTS, url, HASHED, Machine())
    with pytest.raises(KeyboardInterrupt):
        build_chroma(broken(), url, HASHED, Machine())
    retriever = open_chroma(url, Config())
    assert retriever.info == info
    assert found(retriever, "alpha7 beta7")[0] == "d7"


def test_a_build_that_ends_before_the_new_index_has_its_name_loses_nothing(server, monkeypatch) -> None:
    from chromadb import Collection

    def killed(*arguments: object, name: str | None = None, **options: object) -> None:
        if name is not None:
            raise KeyboardInterrupt
        modify(*arguments, **options)

    def broken():
        yield from DOCUMENTS
        raise KeyboardInterrupt

    url, modify = f"{server.url}#unnamed", Collection.modify
    build_chroma(DOCUMENTS[:30], url, HASHED, Machine())
    with monkeypatch.context() as patch:
        patch.setattr(Collection, "modify", killed)
        with pytest.raises(KeyboardInterrupt):
            build_chroma(DOCUMENTS, url, HASHED, Machine())
    retriever = open_chroma(url, Config())
    assert retriever.info.documents == len(DOCUMENTS)
    with pytest.raises(KeyboardInterrupt):
        build_chroma(broken(), url, HASHED, Machine())
    assert open_chroma(url, Config()).info == retriever.info
    assert found(retriever, "alpha47 beta47")[0] == "d47"
    assert build_chroma(DOCUMENTS[:30], url, HASHED, Machine()) == open_chroma(url, Config()).info


def test_an_open_reader_never_sees_another_index(server) -> None:
    url = f"{server.url}#replaced"
    build_chroma(DOCUMENTS, url, HASHED, Machine())
    retriever = open_chroma(url, Config())
    build_chroma(DOCUMENTS[10:], url, HASHED, Machine())
    (answer,) = asyncio.run(retriever.search([SearchRequest("alpha7", 5, deadline=5.0)]))
    assert isinstance(answer, RetrievalFault)
    assert found(open_chroma(url, Config()), "alpha17 beta17")[0] == "d17"


def test_what_chroma_cannot_do_is_refused_before_anything_is_written(server) -> None:
    for mode in ("bm25", "hybrid"):
        with pytest.raises(ConfigError, match="no BM25"):
            open_chroma(server.url, Config(env=Env(retrieval=Retrieval(mode=mode))))
    with pytest.raises(ConfigError, match="rerank"):
        open_chroma(server.url, Config(env=Env(retrieval=Retrieval(rerank=Rerank(on=True)))))
    with pytest.raises(ConfigError, match=r"index\.dense\.model"):
        build_chroma(DOCUMENTS, server.url, config.Index(), Machine())
    with pytest.raises(ConfigError, match="HNSW, not exact"):
        build_chroma(DOCUMENTS, server.url, config.Index(dense=Dense(model="hash:64")), Machine())


def test_an_index_that_lost_chunks_or_is_none_is_not_opened(server) -> None:
    url = f"{server.url}#damaged"
    build_chroma(DOCUMENTS, url, HASHED, Machine())
    client = connect(parse_address(url), 5.0)
    client.get_collection("damaged", embedding_function=None).delete(ids=["d3"])
    with pytest.raises(CorpusError, match="59 chunks instead of 60"):
        open_chroma(url, Config())
    client.create_collection("foreign", embedding_function=None)
    with pytest.raises(CorpusError, match="not an index of harness1"):
        open_chroma(f"{server.url}#foreign", Config())
    with pytest.raises(CorpusError, match="name another #COLLECTION"):
        build_chroma(DOCUMENTS, f"{server.url}#foreign", HASHED, Machine())
    assert client.get_collection("foreign", embedding_function=None).count() == 0


def test_thousands_of_exclusions_are_answered(server) -> None:
    url = f"{server.url}#many"
    build_chroma(DOCUMENTS, url, HASHED, Machine())
    excluded = frozenset(ChunkId(f"d{n}") for n in range(5000) if n != 50)
    (answer,) = asyncio.run(open_chroma(url, Config()).search([SearchRequest("common", 5, excluded)]))
    assert isinstance(answer, SearchResult)
    assert [hit.chunk.chunk_id for hit in answer.hits] == ["d50"]


def test_wrong_addresses_are_told_apart() -> None:
    for spec in (
        "folder",
        "ftp://host",
        "http://user:secret@host",
        "http://host/path",
        "http://host#a",
        "http://host# b c",
    ):
        with pytest.raises(UsageError) as error:
            parse_address(spec)
        assert "secret" not in str(error.value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(InfrastructureFault):
            open_chroma(f"http://127.0.0.1:{free.getsockname()[1]}", Config(machine=Machine(call_deadline_s=1.0)))


SILENCE_S = 3.0


class Proxy:
    """Stands between client and server; `mode` makes it pass on, answer nonsense, fail, or say nothing."""

    def __init__(self, target: str) -> None:
        proxy = self
        self.mode = "pass"

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                import httpx

                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, answer = 200, b"<html>nonsense"
                if proxy.mode == "pass":
                    passed = httpx.request(
                        self.command, target + self.path, content=body, headers={"content-type": "application/json"}
                    )
                    status, answer = passed.status_code, passed.content
                elif proxy.mode == "silent":
                    time.sleep(SILENCE_S)
                elif proxy.mode != "nonsense":
                    status = int(proxy.mode)
                with suppress(OSError):  # whoever asked may have given up
                    self.send_response(status)
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            do_GET = do_POST = do  # noqa: N815

            def log_message(self, *arguments: object) -> None:
                pass

        # The threads are daemons, so that closing does not wait for a silent one.
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize("mode", ["500", "502", "404", "429", "nonsense", "silent"])
def test_whatever_goes_wrong_on_the_way_is_a_fault(server, mode: str) -> None:
    proxy = Proxy(server.url)
    build_chroma(DOCUMENTS, f"{server.url}#proxied", HASHED, Machine())
    retriever = open_chroma(f"{proxy.url}#proxied", Config(machine=Machine(call_deadline_s=1.0)))
    assert found(retriever, "alpha7 beta7")[0] == "d7"
    proxy.mode = mode
    begin = time.monotonic()
    answers = [
        *asyncio.run(retriever.search([SearchRequest("alpha7", 5, deadline=0.5)])),
        asyncio.run(retriever.grep("alpha7", 5, 0.5)),
        asyncio.run(retriever.read(DocId("d7"))),
    ]
    assert [type(answer) for answer in answers] == [RetrievalFault] * 3
    assert time.monotonic() - begin < 3.0
    with pytest.raises(InfrastructureFault):
        open_chroma(f"{proxy.url}#proxied", Config(machine=Machine(call_deadline_s=1.0)))
    proxy.close()


def test_a_silent_server_does_not_hold_the_threads(server) -> None:
    proxy = Proxy(server.url)
    build_chroma(DOCUMENTS, f"{server.url}#silent", HASHED, Machine())
    retriever = open_chroma(f"{proxy.url}#silent", Config(machine=Machine(call_deadline_s=1.0, concurrency=1)))
    proxy.mode = "silent"
    assert isinstance(asyncio.run(retriever.read(DocId("d7"))), RetrievalFault)
    proxy.mode = "pass"
    (answer,) = asyncio.run(retriever.search([SearchRequest("alpha7 beta7", 1, deadline=SILENCE_S - 1.0)]))
    assert isinstance(answer, SearchResult)
    proxy.close()


def test_grep_is_narrowed_by_the_server_and_put_in_corpus_order_here(server, monkeypatch) -> None:
    from chromadb import Collection

    build_chroma(DOCUMENTS[::-1], f"{server.url}#grep", HASHED, Machine())
    retriever = open_chroma(f"{server.url}#grep", Config())
    get, sent = Collection.get, []

    def backwards(*arguments, **options):
        found = get(*arguments, **options)
        sent.append(len(found["ids"]))
        return found | {name: found[name][::-1] for name in ("ids", "documents", "metadatas")}

    monkeypatch.setattr(Collection, "get", backwards)
    chunks = asyncio.run(retriever.grep(r"alpha5\d beta5[12]", 5, 5.0))
    assert isinstance(chunks, tuple)
    assert [chunk.doc_id for chunk in chunks] == ["d52", "d51"]
    assert sent == [11]


def test_the_command_line_names_engines_by_a_prefix(server) -> None:
    info = build_engine(f"chroma:{server.url}#cli", DOCUMENTS, HASHED, Machine())
    assert open_chroma(f"{server.url}#cli", Config()).info == info
