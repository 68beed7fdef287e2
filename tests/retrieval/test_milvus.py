import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness1 import config
from harness1.config import Config, Dense, Env, Machine, Rerank, Retrieval
from harness1.errors import ConfigError, CorpusError, InfrastructureFault, UsageError
from harness1.records import DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.milvus import build_milvus, connect, open_milvus, parse_address
from harness1.retrieval.open import build_engine
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest, SearchResult

pytestmark = pytest.mark.service

DOCUMENTS = [Document(DocId(f"d{n}"), f"Title {n}", f"Common words and alpha{n} beta{n}.") for n in range(60)]
HASHED = config.Index(dense=Dense(model="hash:256"))


@pytest.fixture
def path(tmp_path):
    from milvus_lite.server_manager import server_manager_instance

    yield tmp_path / "lite.db"
    server_manager_instance.release_server(str(tmp_path / "lite.db"))


def settings(**retrieval) -> Config:
    return Config(env=Env(retrieval=Retrieval(**retrieval)))


def found(retriever: Retriever, query: str, k: int = 5) -> list[str]:
    (answer,) = asyncio.run(retriever.search([SearchRequest(query, k)]))
    assert isinstance(answer, SearchResult), answer
    return [hit.chunk.doc_id for hit in answer.hits]


def collections(path: Path) -> set[str]:
    client = connect(parse_address(str(path)), 5.0)
    return set(client.list_collections())


def test_an_interrupted_build_leaves_the_earlier_index_and_the_next_one_cleans_up(path) -> None:
    def broken():
        yield from DOCUMENTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_milvus(broken(), str(path), config.Index(), Machine())
    with pytest.raises(CorpusError, match="no finished index"):
        open_milvus(str(path), Config())
    info = build_milvus(DOCUMENTS[:50], str(path), config.Index(), Machine())
    with pytest.raises(KeyboardInterrupt):
        build_milvus(broken(), str(path), config.Index(), Machine())
    assert len(collections(path)) == 2
    retriever = open_milvus(str(path), Config())
    assert retriever.info == info
    assert found(retriever, "alpha7") == ["d7"]
    build_milvus(DOCUMENTS[:50], str(path), config.Index(), Machine())
    assert len(collections(path)) == 1


def test_an_open_reader_never_sees_another_index(path) -> None:
    build_milvus(DOCUMENTS, str(path), config.Index(), Machine())
    retriever = open_milvus(str(path), Config(machine=Machine(call_deadline_s=2.0)))
    assert found(retriever, "alpha7") == ["d7"]
    build_milvus(DOCUMENTS[10:], str(path), HASHED, Machine())
    (answer,) = asyncio.run(retriever.search([SearchRequest("alpha7", 5, deadline=2.0)]))
    assert isinstance(answer, RetrievalFault)
    assert found(open_milvus(str(path), settings(mode="bm25")), "alpha17") == ["d17"]


def test_two_indexes_share_a_file_and_foreign_collections_are_left_alone(path) -> None:
    build_milvus(DOCUMENTS[:30], f"{path}#one", config.Index(), Machine())
    build_milvus(DOCUMENTS[30:], f"{path}#two", config.Index(), Machine())
    client = connect(parse_address(str(path)), 5.0)
    client.create_collection("one__mine", dimension=4)
    client.create_collection("plain", dimension=4)
    build_milvus(DOCUMENTS[:20], f"{path}#one", config.Index(), Machine())
    assert {"one__mine", "plain"} <= collections(path)
    assert found(open_milvus(f"{path}#two", Config()), "alpha40") == ["d40"]
    assert found(open_milvus(f"{path}#one", Config()), "alpha25") == []
    with pytest.raises(UsageError, match="not made by harness1"):
        build_milvus(DOCUMENTS, f"{path}#plain", config.Index(), Machine())
    with pytest.raises(CorpusError):
        open_milvus(f"{path}#plain", Config())


@pytest.mark.parametrize("search", ["exact", "hnsw", "ivf"])
def test_dense_indexes_of_every_kind_find_near_texts(path, search: str) -> None:
    index = config.Index(dense=Dense(model="hash:256", search=search))
    build_milvus(DOCUMENTS, str(path), index, Machine())
    for mode in ("dense", "hybrid", "auto"):
        assert found(open_milvus(str(path), settings(mode=mode)), "alpha7 beta7")[0] == "d7"


def test_the_mode_decides_whether_words_or_neighbours_are_found(path) -> None:
    build_milvus(DOCUMENTS, str(path), HASHED, Machine())
    assert found(open_milvus(str(path), settings(mode="bm25")), "alpha7") == ["d7"]
    assert len(found(open_milvus(str(path), settings(mode="dense")), "alpha7")) == 5
    assert len(found(open_milvus(str(path), settings()), "alpha7")) == 5


def test_the_depth_of_a_list_never_falls_below_k(path, monkeypatch) -> None:
    build_milvus(DOCUMENTS, str(path), HASHED, Machine())
    found_by_both = found(open_milvus(str(path), settings()), "common words alpha7", 40)
    assert len(found_by_both) == 40
    monkeypatch.setattr("harness1.retrieval.engines.milvus.BM25_DEPTH", 1)
    monkeypatch.setattr("harness1.retrieval.engines.milvus.DENSE_DEPTH", 1)
    shallow = open_milvus(str(path), settings())
    assert found(shallow, "common words alpha7", 40) == found_by_both


def test_grep_is_narrowed_by_the_server_and_put_in_corpus_order_here(path, monkeypatch) -> None:
    from pymilvus import MilvusClient

    build_milvus(DOCUMENTS, str(path), config.Index(), Machine())
    retriever = open_milvus(str(path), Config())
    query, sent = MilvusClient.query, []

    def backwards(*arguments, **options):
        rows = query(*arguments, **options)[::-1]
        sent.append(len(rows))
        return rows

    monkeypatch.setattr(MilvusClient, "query", backwards)
    chunks = asyncio.run(retriever.grep(r"alpha5\d beta5[12]", 5, 5.0))
    assert isinstance(chunks, tuple)
    assert [chunk.doc_id for chunk in chunks] == ["d51", "d52"]
    assert sent == [11]


def test_what_milvus_cannot_rank_is_refused(path) -> None:
    build_milvus(DOCUMENTS, f"{path}#plain", config.Index(), Machine())
    build_milvus(DOCUMENTS, f"{path}#hashed", HASHED, Machine())
    for mode in ("dense", "hybrid"):
        with pytest.raises(ConfigError, match=r"index\.dense\.model"):
            open_milvus(f"{path}#plain", settings(mode=mode))
    with pytest.raises(ConfigError, match="rerank"):
        open_milvus(f"{path}#plain", settings(rerank=Rerank(on=True)))


def test_an_index_that_lost_chunks_or_its_description_is_not_opened(path) -> None:
    build_milvus(DOCUMENTS, str(path), config.Index(), Machine())
    client = connect(parse_address(str(path)), 5.0)
    (name,) = collections(path)
    client.delete(name, ids=["d3"])
    with pytest.raises(CorpusError, match="59 chunks instead of 60"):
        open_milvus(str(path), Config())
    client.drop_collection_properties(name, ["harness1.index"])
    with pytest.raises(CorpusError, match="not an index of harness1"):
        open_milvus(str(path), Config())


def test_a_chunk_too_long_for_milvus_is_named(path) -> None:
    long = Document(DocId("long"), "Title", "word " * 20_000)
    with pytest.raises(CorpusError, match=r"'long'.*index\.chunk_tokens"):
        build_milvus([long], str(path), config.Index(chunk_tokens=50_000), Machine())


def test_a_file_that_another_process_has_open_is_refused(path) -> None:
    from milvus_lite.server_manager import server_manager_instance

    build_milvus(DOCUMENTS, str(path), config.Index(), Machine())
    server_manager_instance.release_server(str(path))
    hold = (
        "import sys\nfrom milvus_lite.db import MilvusLite\ndb = MilvusLite(sys.argv[1])\nprint(1, flush=True)\ninput()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold, str(path)], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UsageError, match="one process at a time"):
            open_milvus(str(path), Config())
        holder.kill()
    assert open_milvus(str(path), Config()).info.chunks == 60


def test_wrong_addresses_are_told_apart(tmp_path) -> None:
    for spec in ("folder", "ftp://user:secret@host", f"{tmp_path}/a.db#bad name", f"{tmp_path}/a.db#9"):
        with pytest.raises(UsageError) as error:
            parse_address(spec)
        assert "secret" not in str(error.value)
    with pytest.raises(CorpusError, match="does not exist"):
        open_milvus(f"{tmp_path}/absent.db", Config())
    assert not (tmp_path / "absent.db").exists()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(InfrastructureFault):
            open_milvus(f"http://127.0.0.1:{free.getsockname()[1]}", Config(machine=Machine(call_deadline_s=1.0)))
    assert "secret" not in str(parse_address("http://user:my@secret@host:19530#x"))


def test_the_command_line_names_engines_by_a_prefix(path) -> None:
    info = build_engine(f"milvus:{path}#cli", DOCUMENTS, config.Index(), Machine())
    assert open_milvus(f"{path}#cli", Config()).info == info
    for spec in ("qdrant:http://user:secret@host", "milvus", str(path)):
        with pytest.raises(UsageError, match="milvus:PATH") as error:
            build_engine(spec, DOCUMENTS, config.Index(), Machine())
        assert "secret" not in str(error.value)


JAPANESE = [
    Document(DocId("tower"), "東京タワー", "1958年に完成した。設計者は内藤多仲である。"),
    Document(DocId("fuji"), "富士山", "日本で最も高い山である。"),
    Document(DocId("capital"), "京都", "古い都である。"),
]


def test_pairs_of_characters_are_terms_and_not_cut_again(path) -> None:
    info = build_milvus(JAPANESE, str(path), config.Index(), Machine())
    retriever = open_milvus(str(path), Config())
    assert retriever.info == info
    assert info.language == "auto"
    assert found(retriever, "設計者は誰") == ["tower"]
    assert found(retriever, "京") == [], "東京 and 京都 hold it, and are terms of their own"


def test_a_language_is_stemmed_as_in_an_index_folder(path) -> None:
    german = [Document(DocId("a"), "", "Die Häuser der Stadt"), Document(DocId("b"), "", "Ein Buch")]
    info = build_milvus(german, str(path), config.Index(language="german"), Machine())
    assert info.language == "german"
    assert found(open_milvus(str(path), Config()), "Haus") == ["a"]
