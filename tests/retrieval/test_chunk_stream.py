import msgspec
import pytest

from harness1 import config
from harness1.errors import CorpusError, SchemaError
from harness1.records import DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.engine import FORMAT, ChunkStream, EngineIndex
from harness1.retrieval.protocol import IndexInfo

SETTINGS = config.Index(chunk_tokens=4)


def document(name: str, text: str = "One. Two three four five. Six.") -> Document:
    return Document(DocId(name), "Title", text)


def passed(documents: list[Document], settings: config.Index = SETTINGS) -> ChunkStream:
    stream = ChunkStream(documents, settings)
    for _ in stream.batches(2):
        pass
    return stream


def test_chunks_come_in_corpus_order_in_batches_and_are_counted() -> None:
    stream = ChunkStream([document("a"), document("b", "Short.")], SETTINGS)
    batches = list(stream.batches(2))
    placed = [item for batch in batches for item in batch]
    assert [len(batch) for batch in batches[:-1]] == [2] * (len(batches) - 1)
    assert [position for position, _ in placed] == list(range(len(placed)))
    assert placed[0].chunk.chunk_id == "a#0"
    assert placed[-1].chunk.chunk_id == "b"
    info = stream.finish("engine", "").info
    assert (info.documents, info.chunks) == (2, len(placed))


def test_the_hash_names_documents_settings_engine_and_embedder_in_any_order() -> None:
    documents = [document("a"), document("b")]
    base = passed(documents).finish("engine", "").info.index_hash
    assert passed(documents[::-1]).finish("engine", "").info.index_hash == base
    others = [
        passed(documents[:1]).finish("engine", ""),
        passed(documents, config.Index(chunk_tokens=5)).finish("engine", ""),
        passed(documents).finish("other", ""),
        passed(documents).finish("engine", "model"),
    ]
    assert len({base, *(other.info.index_hash for other in others)}) == 5


def test_the_hash_does_not_depend_on_where_the_model_lies() -> None:
    here, there = (config.Index(dense=config.Dense(model=path)) for path in ("/here/minilm", "/there/minilm"))
    documents = [document("a")]
    hashes = [passed(documents, settings).finish("engine", "model").info.index_hash for settings in (here, there)]
    assert hashes[0] == hashes[1]


def test_a_corpus_must_have_documents_with_ids_of_their_own() -> None:
    with pytest.raises(CorpusError, match="no documents"):
        passed([]).finish("engine", "")
    with pytest.raises(CorpusError, match="'a'"):
        passed([document("a"), document("a")])
    with pytest.raises(CorpusError, match="'a#0'"):
        passed([document("a"), document("a#0", "Short.")])


def test_an_index_of_another_format_is_refused() -> None:
    info = IndexInfo("hash", "document", 1, 1)
    EngineIndex.read(msgspec.json.encode(EngineIndex(FORMAT, info, SETTINGS)).decode(), "x")
    with pytest.raises(SchemaError, match="upgrade"):
        EngineIndex.read(msgspec.json.encode(EngineIndex(FORMAT + 1, info, SETTINGS)).decode(), "x")
    with pytest.raises(CorpusError, match="build it again"):
        EngineIndex.read(msgspec.json.encode(EngineIndex(FORMAT - 1, info, SETTINGS)).decode(), "x")
