"""A damaged index is noticed before its bytes are used: when it is opened, or when a search first needs the damage."""

from __future__ import annotations

import asyncio
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.errors import CorpusError
from harness1.records import DocId
from harness1.retrieval.build import add_documents, build_index, delete_documents
from harness1.retrieval.corpus import Document
from harness1.retrieval.files import (
    BLOCK,
    CHECKSUMS,
    CURRENT,
    CheckedFile,
    DamagedFile,
    Files,
    Keys,
    Sums,
    check_index,
    current_generation,
    write_keys,
)
from harness1.retrieval.index import open_index
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded

HASHED = load_config(None, ["index.dense.model=hash:64"])

DOCUMENTS = list(open_source("world:300").documents())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose larger files have several blocks."""
    path = tmp_path_factory.mktemp("built") / "index"
    build_index(DOCUMENTS, path, HASHED.index)
    return path


@pytest.fixture
def index(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "index"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def file_in(index: Path, name: str) -> Path:
    return current_generation(index) / "segment-000001" / name


def ask(retriever: EmbeddedRetriever, query: str = "river bridge") -> SearchResult | RetrievalFault:
    return asyncio.run(retriever.search([SearchRequest(query, 5)]))[0]


def read(retriever: EmbeddedRetriever, doc_id: DocId) -> object:
    return asyncio.run(retriever.read(doc_id))


def test_a_block_is_verified_when_it_is_first_used_and_a_small_file_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size, late in ((3 * BLOCK + 5, True), (BLOCK, False)):
        path.write_bytes(bytes(size))
        sums = Sums.of(CheckedFile(path).bytes)
        assert bytes(CheckedFile(path, sums).bytes) == bytes(size)
        flip(path, size - 1)
        opened = [CheckedFile(path, sums)] if late else []
        with pytest.raises(DamagedFile, match="file is damaged: see `harness1 index check`"):
            _ = opened[0].bytes if late else CheckedFile(path, sums)
    path.write_bytes(bytes(3 * BLOCK))
    opened = [CheckedFile(path, Sums.of(CheckedFile(path).bytes))]
    flip(path, BLOCK)
    assert bytes(opened[0].part(7, BLOCK)) == bytes(BLOCK - 7)
    for part in ((BLOCK - 1, BLOCK + 1), (2 * BLOCK - 1, 2 * BLOCK), (0, 3 * BLOCK)):
        with pytest.raises(DamagedFile):
            opened[0].part(*part)


def test_a_file_of_another_size_is_damaged_unless_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    sums = Sums.of(CheckedFile(path).bytes)
    path.write_bytes(b"abcd")
    with pytest.raises(DamagedFile, match="4 bytes instead of 3"):
        CheckedFile(path, sums)
    assert bytes(CheckedFile(path, sums, grows=True).bytes) == b"abc"
    path.write_bytes(b"ab")
    with pytest.raises(DamagedFile, match="2 bytes instead of 3"):
        CheckedFile(path, sums, grows=True)


def test_damage_that_a_search_meets_later_is_a_fault_that_names_the_file(index: Path) -> None:
    flip(file_in(index, "contents.bin"), 5)
    retriever = open_embedded(index, Config())
    assert isinstance(read(retriever, DOCUMENTS[-1].doc_id), tuple), "far from the damage"
    fault = read(retriever, DOCUMENTS[0].doc_id)
    assert isinstance(fault, RetrievalFault)
    assert "contents.bin is damaged" in fault.message


def complaints(index: Path) -> list[str]:
    """What opening an index and reading all its postings and lists complain about."""
    try:
        retriever = open_embedded(index, load_config(None, ["env.retrieval.mode=bm25"]))
    except CorpusError as error:
        return [str(error)]
    every_word = " ".join(document.text for document in DOCUMENTS)
    answers = [ask(retriever, every_word), asyncio.run(retriever.grep("zzz", 5, 60.0))]
    return [answer.message for answer in answers if isinstance(answer, RetrievalFault)]


@pytest.mark.parametrize("name", ["postings.chunks.npy", "postings.starts.npy", "trigrams.starts.npy", "terms.bin"])
def test_damage_never_reaches_a_compiled_loop(index: Path, name: str) -> None:
    path = file_in(index, name)
    path.write_bytes(path.read_bytes()[:-64] + b"\xff" * 64)
    assert name in "".join(complaints(index))


def test_a_damaged_row_of_an_embedding_is_no_index_error(index: Path) -> None:
    path = file_in(index, "rows.npy")
    rows = np.load(path)
    rows[3] = 1 << 30
    np.save(path, rows)
    for sums in (True, False):
        if not sums:
            (current_generation(index) / CHECKSUMS).unlink()
        with pytest.raises(CorpusError, match=r"rows\.npy|has the embedding"):
            open_embedded(index, HASHED)


def test_a_damaged_name_of_a_generation_is_not_the_name_of_another(index: Path) -> None:
    add_documents([Document(DocId("new"), "", "text")], index)
    pointer = index / CURRENT
    pointer.write_text(pointer.read_text().replace("2", "1", 1))
    with pytest.raises(CorpusError, match="does not name a generation"):
        open_index(index)


def test_an_index_without_checksums_is_read_and_gets_them_when_it_is_changed(index: Path) -> None:
    expected = ask(open_embedded(index, HASHED))
    assert isinstance(expected, SearchResult)
    (current_generation(index) / CHECKSUMS).unlink()
    (index / CURRENT).write_text("gen-000001\n")
    found = ask(open_embedded(index, HASHED))
    assert isinstance(found, SearchResult)
    assert found.hits == expected.hits
    with pytest.raises(CorpusError, match="has no checksums"):
        check_index(index)
    add_documents([Document(DocId("new"), "", "text")], index)
    assert not check_index(index).damaged


def test_offsets_beyond_the_postings_are_refused_without_checksums_too(index: Path) -> None:
    starts = np.load(file_in(index, "postings.starts.npy"))
    starts[1] = 1 << 40
    np.save(file_in(index, "postings.starts.npy"), starts)
    (current_generation(index) / CHECKSUMS).unlink()
    fault = ask(open_embedded(index, load_config(None, ["env.retrieval.mode=bm25"])))
    assert isinstance(fault, RetrievalFault)
    assert "does not fit the postings" in fault.message


def test_a_change_does_not_take_damage_for_what_was_written(index: Path) -> None:
    flip(file_in(index, "contents.bin"), 5)
    with pytest.raises(CorpusError, match=r"contents\.bin is damaged"):
        delete_documents([DOCUMENTS[0].doc_id], index)
    add_documents([Document(DocId("new"), "", "text")], index)
    (damage,) = check_index(index).damaged
    assert damage.file == "segment-000001/contents.bin"


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", ["keys.bin", "vectors.f16"])
def test_damaged_embeddings_are_not_added_to_and_are_made_anew(index: Path, name: str, is_cut: bool) -> None:
    expected = ask(open_embedded(index, HASHED))
    assert isinstance(expected, SearchResult)
    (path,) = index.glob(f"vectors/*/{name}")
    if is_cut:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, 0)
    assert [damage.file.rpartition("/")[2] for damage in check_index(index).damaged] == [name]
    with pytest.raises(CorpusError, match="damaged"):
        add_documents([Document(DocId("new"), "", "text")], index)
    build_index(DOCUMENTS, index, load_config(None, ["index.dense.model=hash:32"]).index)
    build_index(DOCUMENTS, index, HASHED.index)
    assert not check_index(index).damaged
    found = ask(open_embedded(index, HASHED))
    assert isinstance(found, SearchResult)
    assert found.hits == expected.hits


def test_embeddings_that_are_damaged_during_a_build_are_not_taken_for_what_was_written(index: Path) -> None:
    (path,) = index.glob("vectors/*/vectors.f16")
    before = current_generation(index)
    with pytest.raises(CorpusError, match=r"vectors\.f16 is damaged"):
        add_documents([Document(DocId("new"), "", "text")], index, lambda *_: flip(path, 5))
    assert current_generation(index) == before


def test_embeddings_are_not_believed_where_the_checksums_are_damaged(index: Path) -> None:
    before = current_generation(index) / CHECKSUMS
    (path,) = index.glob("vectors/*/vectors.f16")
    whole = path.read_bytes()
    flip(path, 1)
    flip(before, before.stat().st_size // 2)
    build_index(DOCUMENTS, index, HASHED.index)
    assert path.read_bytes() == whole


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True, max_size=30), st.text(max_size=3))
def test_keys_are_read_and_found_again(tmp_path, values, other) -> None:
    write_keys(tmp_path, "keys", values)
    keys = Keys(Files(tmp_path), "keys")
    assert [keys[at] for at in range(len(keys))] == values
    assert keys.find(values) == list(range(len(values)))
    assert keys.find([other]) == [values.index(other) if other in values else -1]


def test_strings_with_equal_checksums_are_told_apart(tmp_path) -> None:
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    write_keys(tmp_path, "keys", ["buckeroo", "plumless"])
    assert Keys(Files(tmp_path), "keys").find(["plumless", "buckeroo", "absent"]) == [1, 0, -1]
    write_keys(tmp_path, "one", ["buckeroo"])
    assert Keys(Files(tmp_path), "one").find(["plumless"]) == [-1]
    (tmp_path / "one.bin").write_bytes(b"buck")
    with pytest.raises(ValueError, match="4 bytes instead of 8"):
        Keys(Files(tmp_path), "one")
