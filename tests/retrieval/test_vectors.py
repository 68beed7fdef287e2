"""The store of embeddings: each text embedded once, whatever happens to the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness1.errors import CorpusError, UsageError
from harness1.retrieval.embedder import HashEmbedder, VectorStore, open_vectors
from harness1.retrieval.files import Files

SIZE = 32
TEXTS = [f"chunk {number} of the corpus of treaty {number % 7}" for number in range(20)]


class Counting(HashEmbedder):
    """Records what it was given."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.batches: list[list[str]] = []

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.batches.append(list(texts))
        return super().embed_documents(texts)


def expected(texts: Sequence[str]) -> NDArray[np.float16]:
    return HashEmbedder(SIZE).embed_documents(texts).astype(np.float16)


def assert_holds(folder: Path, texts: Sequence[str], rows: NDArray[np.int32]) -> None:
    store = VectorStore(folder, SIZE)
    assert np.array_equal(open_vectors(Files(folder), SIZE, len(store))[rows], expected(texts))


def test_every_text_gets_the_row_of_its_vector_and_equal_texts_share_one(tmp_path: Path) -> None:
    embedder, texts = Counting(), [*TEXTS, *TEXTS[5:10], "another"]
    rows = VectorStore(tmp_path / "new", SIZE).ensure(texts, embedder, batch=6)
    assert rows.dtype == np.int32
    assert rows.tolist() == [*range(20), *range(5, 10), 20]
    assert [len(batch) for batch in embedder.batches] == [6, 6, 6, 3]
    assert len(VectorStore(tmp_path / "new", SIZE)) == 21
    assert_holds(tmp_path / "new", texts, rows)


def test_only_new_texts_are_embedded(tmp_path: Path) -> None:
    VectorStore(tmp_path, SIZE).ensure(TEXTS[:12], Counting())
    embedder = Counting()
    rows = VectorStore(tmp_path, SIZE).ensure(reversed(TEXTS), embedder)
    assert embedder.batches == [TEXTS[:11:-1]]
    assert_holds(tmp_path, TEXTS[::-1], rows)


def test_texts_are_read_as_they_are_needed(tmp_path: Path) -> None:
    embedder = Counting()

    def texts() -> Iterator[str]:
        for number, text in enumerate(TEXTS):
            assert number <= 4 * len(embedder.batches) + 4
            yield text

    VectorStore(tmp_path, SIZE).ensure(texts(), embedder, batch=4)
    assert len(embedder.batches) == 5


def test_progress_counts_texts_and_what_was_embedded(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    store = VectorStore(tmp_path, SIZE)
    store.ensure(TEXTS[:3], Counting(), lambda done, fresh: reports.append((done, fresh)), batch=2)
    store.ensure([*TEXTS[:8], *TEXTS[:2]], Counting(), lambda done, fresh: reports.append((done, fresh)), batch=4)
    assert reports == [(2, 2), (3, 3), (7, 4), (10, 5)]


@pytest.mark.parametrize("lost", [1, 7, 15, 16, 17, 40])
@pytest.mark.parametrize("name", ["keys.bin", "vectors.f16"])
def test_a_torn_tail_is_not_seen_and_is_made_anew(tmp_path: Path, name: str, lost: int) -> None:
    VectorStore(tmp_path, SIZE).ensure(TEXTS, Counting())
    path = tmp_path / name
    os.truncate(path, path.stat().st_size - lost)
    whole = len(VectorStore(tmp_path, SIZE))
    assert whole == 20 - -(-lost // (16 if name == "keys.bin" else 2 * SIZE))
    assert np.array_equal(open_vectors(Files(tmp_path), SIZE, whole), expected(TEXTS[:whole]))
    embedder = Counting()
    rows = VectorStore(tmp_path, SIZE).ensure(TEXTS, embedder)
    assert embedder.batches == [TEXTS[whole:]]
    assert rows.tolist() == list(range(20))
    assert_holds(tmp_path, TEXTS, rows)


KILLED = """
import sys
from pathlib import Path
from harness1.retrieval.files import Files
from harness1.retrieval.embedder import HashEmbedder
from harness1.retrieval.embedder import VectorStore

texts = (f"text {number}" for number in range(10**9))
VectorStore(Path(sys.argv[1]), 32).ensure(texts, HashEmbedder(32), lambda *_: print(flush=True), batch=3)
"""


def test_a_killed_writer_leaves_a_good_store_and_no_lock(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(5):
            writer.stdout.readline()
        with pytest.raises(UsageError, match="another process"):
            VectorStore(tmp_path, SIZE).ensure(TEXTS, Counting())
        writer.send_signal(signal.SIGKILL)
    whole = len(VectorStore(tmp_path, SIZE))
    texts = [f"text {number}" for number in range(whole + 2)]
    assert whole >= 15
    assert np.array_equal(open_vectors(Files(tmp_path), SIZE, whole), expected(texts[:whole]))
    embedder = Counting()
    assert_holds(tmp_path, texts, VectorStore(tmp_path, SIZE).ensure(texts, embedder))
    assert embedder.batches == [texts[whole:]]


def test_a_failing_embedder_loses_only_its_batch(tmp_path: Path) -> None:
    class Failing(Counting):
        def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
            if len(self.batches) == 2:
                raise RuntimeError("out of memory")
            return super().embed_documents(texts)

    with pytest.raises(RuntimeError, match="out of memory"):
        VectorStore(tmp_path, SIZE).ensure(TEXTS, Failing(), batch=5)
    embedder = Counting()
    assert_holds(tmp_path, TEXTS, VectorStore(tmp_path, SIZE).ensure(TEXTS, embedder))
    assert embedder.batches == [TEXTS[10:]]


def test_an_open_reader_keeps_its_rows_while_the_store_grows(tmp_path: Path) -> None:
    store = VectorStore(tmp_path, SIZE)
    store.ensure(TEXTS[:5], Counting())
    held = open_vectors(Files(tmp_path), SIZE, 5)
    store.ensure(TEXTS, Counting())
    assert held.shape == (5, SIZE)
    assert np.array_equal(held, expected(TEXTS[:5]))
    assert not held.flags.writeable


def test_an_empty_store_can_be_opened_and_a_short_one_is_refused(tmp_path: Path) -> None:
    assert open_vectors(Files(tmp_path), SIZE, 0).shape == (0, SIZE)
    VectorStore(tmp_path, SIZE).ensure(TEXTS[:5], Counting())
    with pytest.raises(CorpusError, match="5 embeddings"):
        open_vectors(Files(tmp_path), SIZE, 6)


def test_a_folder_that_cannot_be_written_is_the_users_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match="file"):
        VectorStore(tmp_path / "file", SIZE).ensure(TEXTS, Counting())
