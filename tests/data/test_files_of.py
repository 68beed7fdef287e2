"""The files of an index: found where it was made from a folder of texts, and nowhere else."""

from __future__ import annotations

from pathlib import Path

from harness1.config import Config
from harness1.data.indexing import ensure_index, files_of
from harness1.data.open import open_source
from harness1.records import DocId


def test_a_document_of_a_folder_is_found_by_its_whole_path(tmp_path: Path) -> None:
    note = tmp_path / "notes" / "a" / "b.md"
    note.parent.mkdir(parents=True)
    note.write_text("# Bridges\n\nA bridge.\n")
    (tmp_path / "beside.md").write_text("not of the corpus")
    ensure_index(open_source(str(tmp_path / "notes")), tmp_path / "index", Config())
    files = files_of(str(tmp_path / "index"))
    assert files(DocId("a/b.md")) == note
    for other in ("c.md", "a", "../beside.md", str(note), "x" * 5000, "a\0b"):
        assert files(DocId(other)) is None
    note.unlink()
    assert files(DocId("a/b.md")) is None


def test_an_engine_and_a_generated_corpus_have_no_files(tmp_path: Path) -> None:
    ensure_index(open_source("world:30"), tmp_path / "index", Config())
    assert files_of(str(tmp_path / "index"))(DocId("a")) is None
    assert files_of("http://127.0.0.1:1")(DocId("a")) is None
