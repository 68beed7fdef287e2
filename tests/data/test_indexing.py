"""The card of an index is the card of what lies there, whoever else builds; and who finds another at work may wait."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness1.config import Config, load_config
from harness1.data import indexing
from harness1.data.indexing import add_to_index, delete_from_index, ensure_index, files_of, index_of
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Document
from harness1.retrieval.index import open_index
from harness1.retrieval.models import Progress
from harness1.runs.files import read_stage

SMALL, LARGE = open_source("world:20"), open_source("world:30")
CONFIG = Config()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "index"


def test_a_build_that_is_refused_leaves_the_card_of_the_other_alone(out: Path) -> None:
    ensure_index(SMALL, out, CONFIG)

    @contextmanager
    def intrude(source: Source) -> Iterator[tuple[Iterator[Document], Progress | None]]:
        before = read_stage(out)
        with pytest.raises(UsageError, match="another build is at work"):
            ensure_index(SMALL, out, CONFIG, force=True)
        assert read_stage(out) == before
        yield source.documents(), None

    ensure_index(LARGE, out, CONFIG, force=True, read=intrude)
    card = read_stage(out)
    assert (card.status, card.outputs["documents"], open_index(out).info.documents) == ("finished", 30, 30)


def test_a_card_of_another_index_is_not_believed(out: Path) -> None:
    ensure_index(SMALL, out, CONFIG)
    build_index(LARGE.documents(), out, CONFIG.index)
    assert ensure_index(SMALL, out, CONFIG).documents == open_index(out).info.documents == 20


def test_who_waits_says_so_once_and_uses_what_was_built(tmp_path: Path) -> None:
    (ready, started), (heard, waits) = os.pipe(), os.pipe()
    said: list[str] = []
    child = os.fork()
    if not child:

        @contextmanager
        def slowly(source: Source) -> Iterator[tuple[Iterator[Document], Progress | None]]:
            os.write(started, b"x")
            os.read(heard, 1)
            yield source.documents(), None

        try:
            index_of(SMALL, None, tmp_path, CONFIG, slowly)
        finally:
            os._exit(0)

    @contextmanager
    def never(_: Source) -> Iterator[tuple[Iterator[Document], Progress | None]]:
        raise AssertionError("the corpus was read again")
        yield

    def say(line: str) -> None:
        said.append(line)
        os.write(waits, b"x")

    os.read(ready, 1)
    try:
        index = index_of(SMALL, None, tmp_path, CONFIG, never, say)
    finally:
        os.write(waits, b"x")
        os.waitpid(child, 0)
    assert open_index(Path(index)).info.documents == 20
    assert said == [f"waiting for another process that indexes {SMALL.name}"]


def test_neither_a_lock_nor_a_card_that_is_being_written_is_a_foreign_file(tmp_path: Path) -> None:
    (tmp_path / ".stage.json.7").touch()
    (tmp_path / ".lock").touch()
    assert ensure_index(SMALL, tmp_path, CONFIG).documents == 20
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".hidden").touch()
    with pytest.raises(CorpusError, match="holds no index"):
        ensure_index(SMALL, tmp_path / "other", CONFIG)


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Source, Source]:
    for name in ("ours", "theirs"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"_id": name, "text": f"Words of {name}."}) + "\n")
    return open_source(str(tmp_path / "ours.jsonl")), open_source(str(tmp_path / "theirs.jsonl"))


def test_the_index_of_another_corpus_is_replaced_only_by_force(corpora: tuple[Source, Source], out: Path) -> None:
    ours, theirs = corpora
    ensure_index(ours, out, CONFIG)
    add_to_index(theirs, out, CONFIG)
    first = delete_from_index(["theirs"], out, CONFIG)
    with pytest.raises(UsageError, match=r"is the index of .*ours.jsonl: --force replaces it"):
        ensure_index(theirs, out, CONFIG)
    assert open_index(out).info.index_hash == first.index_hash
    assert ensure_index(theirs, out, CONFIG, force=True).index_hash != first.index_hash


def test_embeddings_are_lost_only_by_force(out: Path) -> None:
    first = ensure_index(SMALL, out, load_config(None, ["index.dense.model=hash:32"]))
    with pytest.raises(UsageError, match=r"has embeddings: .* --force without"):
        ensure_index(SMALL, out, CONFIG)
    assert open_index(out).info == first
    ensure_index(SMALL, out, load_config(None, ["index.dense.model=hash:64"]))
    ensure_index(SMALL, out, CONFIG, force=True)
    assert not open_index(out).vectors


def test_an_index_of_removed_settings_is_replaced_only_by_force(out: Path) -> None:
    ensure_index(SMALL, out, load_config(None, ["index.dense.model=hash:32"]))
    manifest = out / "gen-000001" / "index.json"
    fields = json.loads(manifest.read_text())
    fields["settings"]["dense"]["hnsw_links"] = 7
    manifest.write_text(json.dumps(fields))
    with pytest.raises(CorpusError, match=r"must be built again, with .*--force.*hnsw_links was removed"):
        ensure_index(SMALL, out, CONFIG)
    ensure_index(SMALL, out, CONFIG, force=True)


def test_another_corpus_that_was_built_meanwhile_is_not_replaced(
    corpora: tuple[Source, Source], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = corpora

    @contextmanager
    def late(folder: Path, on_wait: Callable[[], None] | None) -> Iterator[None]:
        monkeypatch.undo()
        ensure_index(theirs, folder, CONFIG)
        yield

    monkeypatch.setattr(indexing, "building", late)
    with pytest.raises(UsageError, match=r"is the index of .*theirs.jsonl"):
        ensure_index(ours, out, CONFIG)


def test_a_document_of_a_folder_is_found_by_its_whole_path(tmp_path: Path) -> None:
    note = tmp_path / "notes" / "a" / "b.md"
    note.parent.mkdir(parents=True)
    note.write_text("# Bridges\n\nA bridge.\n")
    (tmp_path / "beside.md").write_text("not of the corpus")
    ensure_index(open_source(str(tmp_path / "notes")), tmp_path / "index", CONFIG)
    files = files_of(str(tmp_path / "index"))
    assert files(DocId("a/b.md")) == note
    for other in ("c.md", "a", "../beside.md", str(note), "x" * 5000, "a\0b"):
        assert files(DocId(other)) is None
    note.unlink()
    assert files(DocId("a/b.md")) is None
    ensure_index(SMALL, tmp_path / "world", CONFIG)
    for none in (str(tmp_path / "world"), "http://127.0.0.1:1"):  # a generated corpus, an engine
        assert files_of(none)(DocId("a")) is None
