import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness1 import config
from harness1.errors import CorpusError, SchemaError, UsageError
from harness1.records import ChunkId, DocId
from harness1.retrieval import index as index_module
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Document
from harness1.retrieval.index import open_index

SETTINGS = config.Index(chunk_tokens=8)
LONG = "The first sentence is here. The second one is there. The third is last."


def corpus(*words: str) -> list[Document]:
    return [Document(doc_id=DocId(f"id-{word}"), title=word.title(), text=f"About {word}.") for word in words]


def contents(path: Path) -> list[tuple[str, str, str, int, str]]:
    index = open_index(path)
    chunks = [index.chunk(position) for position in range(len(index))]
    return [(chunk.chunk_id, chunk.doc_id, chunk.title, chunk.index, chunk.text) for chunk in chunks]


def test_chunks_come_back_as_they_were(tmp_path) -> None:
    documents = [
        Document(doc_id=DocId("a"), title="Ä\ntitle", text="short – ok"),
        Document(doc_id=DocId("b#1"), title="", text=LONG),
        Document(doc_id=DocId("c"), title="only a title", text=""),
    ]
    info = build_index(documents, tmp_path, SETTINGS)
    assert (info.documents, info.chunks, info.unit) == (3, 5, "document")
    pieces = ("The first sentence is here.", "The second one is there.", "The third is last.")
    assert contents(tmp_path) == [
        ("a", "a", "Ä\ntitle", 0, "short – ok"),
        *((f"b#1#{at}", "b#1", "", at, text) for at, text in enumerate(pieces)),
        ("c", "c", "only a title", 0, ""),
    ]
    index = open_index(tmp_path)
    assert index.info == info
    assert index.positions([ChunkId("c"), ChunkId("no"), ChunkId("b#1#0")]) == [4, 1]
    assert list(index.positions_of(DocId("b#1"))) == [1, 2, 3]
    assert list(index.positions_of(DocId("b#1#0"))) == []
    assert index.chunk(2) is index.chunk(2)


def test_the_hash_notices_moved_titles_and_the_size_of_chunks(tmp_path) -> None:
    sun, moon = corpus("sun", "moon")
    moved = [replace(sun, title="Moon"), replace(moon, title="Sun")]
    builds = (([sun, moon], SETTINGS), (moved, SETTINGS), ([sun, moon], config.Index(chunk_tokens=9)))
    assert len({build_index(documents, tmp_path, settings).index_hash for documents, settings in builds}) == 3


def test_a_reader_keeps_its_generation_while_later_ones_replace_it(tmp_path) -> None:
    build_index(corpus("sun"), tmp_path, SETTINGS)
    reader = open_index(tmp_path)
    for word in ("moon", "star", "comet"):
        build_index(corpus(word), tmp_path, SETTINGS)
    assert reader.chunk(0).text == "About sun."
    assert reader.bm25.search("sun", 3)
    assert [row[4] for row in contents(tmp_path)] == ["About comet."]
    assert sorted(path.name for path in tmp_path.glob("gen-*")) == ["gen-000003", "gen-000004"]


def test_equal_builds_are_equal_bytes_in_every_process(tmp_path) -> None:
    script = (
        "import sys; from pathlib import Path; from harness1 import config\n"
        "from harness1.retrieval.build import build_index; from harness1.retrieval.corpus import Document\n"
        "build_index([Document(str(n), f'T{n % 5}', f'winter stone word{n % 7} river') for n in range(40)],"
        " Path(sys.argv[1]), config.Index())\n"
    )
    found = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run([sys.executable, "-c", script, str(out)], check=True, env=environment)
        files = [file for file in (out / "gen-000001").rglob("*") if file.is_file()]
        found.append({str(file.relative_to(out)): file.read_bytes() for file in files})
        best = open_index(out).bm25.search("winter stone word3", 12)
        assert [position for position, _ in best] == [10, 17, 24, 3, 31, 38, 0, 1, 11, 12, 13, 14]
    assert found[0] == found[1]


def test_opening_while_generations_are_published_takes_the_newer_one(tmp_path, monkeypatch) -> None:
    for word in ("sun", "moon"):
        build_index(corpus(word), tmp_path, SETTINGS)
    gone = tmp_path / "gen-000000"
    answers = [gone, tmp_path / "gen-000002"]
    monkeypatch.setattr(
        index_module, "current_generation", lambda _: answers.pop(0) if len(answers) > 1 else answers[0]
    )
    assert open_index(tmp_path).chunk(0).text == "About moon."


def test_small_segments_hold_no_files_open(tmp_path) -> None:
    build_index(corpus("sun", "moon"), tmp_path, SETTINGS)
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = open_index(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 1
    assert reader.bm25.search("sun", 3)


def test_too_many_open_files_are_not_called_damage(tmp_path, monkeypatch) -> None:
    build_index(corpus("sun"), tmp_path, SETTINGS)

    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(index_module.Files, "load", refuse)
    with pytest.raises(CorpusError, match="ulimit -n"):
        open_index(tmp_path)


def test_a_build_that_fails_leaves_the_earlier_index_and_no_litter_and_two_do_not_meet(tmp_path) -> None:
    def documents():
        yield from corpus("moon")
        with pytest.raises(UsageError, match="another build is at work"):
            build_index(corpus("star"), tmp_path, SETTINGS)
        raise CorpusError("line 2 is broken")

    build_index(corpus("sun"), tmp_path, SETTINGS)
    with pytest.raises(CorpusError, match="line 2 is broken"):
        build_index(documents(), tmp_path, SETTINGS)
    assert contents(tmp_path)[0][4] == "About sun."
    assert {path.name for path in tmp_path.iterdir()} == {"CURRENT", ".lock", "gen-000001"}


def test_ids_that_would_collide_are_refused(tmp_path) -> None:
    clash = [Document(doc_id=DocId("a"), title="", text=LONG), Document(doc_id=DocId("a#1"), title="", text="x")]
    with pytest.raises(CorpusError, match=r"'a#1' is the id of a document, and of a chunk of the longer document 'a'"):
        build_index(clash, tmp_path, SETTINGS)
    with pytest.raises(CorpusError, match="two documents have the id 'id-sun'"):
        build_index(corpus("sun", "moon", "sun"), tmp_path, SETTINGS)
    with pytest.raises(CorpusError, match="no documents"):
        build_index([], tmp_path, SETTINGS)


@pytest.mark.parametrize("step", ["fsync", "posix_fallocate"])
def test_a_full_disk_is_a_clear_error_and_the_earlier_index_stays(tmp_path, monkeypatch, step: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    build_index(corpus("sun"), tmp_path, SETTINGS)
    monkeypatch.setattr(os, step, full)
    with pytest.raises(CorpusError, match=r"cannot build an index at .*No space left on device"):
        build_index(corpus("moon"), tmp_path, SETTINGS)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "CURRENT", "gen-000001"}
    assert open_index(tmp_path).chunk(0).text == "About sun."


def test_a_path_that_cannot_be_a_folder_is_a_clear_error(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CorpusError, match="cannot build an index"):
            build_index(corpus("sun"), path, SETTINGS)
        with pytest.raises(CorpusError, match="is not an index; one is built there by: harness1 index SOURCE --out"):
            open_index(path)


def test_a_newer_index_and_a_damaged_one_are_told_apart(tmp_path) -> None:
    build_index(corpus("sun"), tmp_path, SETTINGS)
    manifest = tmp_path / "gen-000001" / "index.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"format": 99, "unknown": 1}))
    with pytest.raises(SchemaError, match="format 99"):
        open_index(tmp_path)
    manifest.write_text(json.dumps(fields))
    contents_file = tmp_path / "gen-000001" / "segment-000001" / "contents.bin"
    contents_file.write_bytes(b"cut")
    with pytest.raises(CorpusError, match="damaged"):
        open_index(tmp_path)
    contents_file.unlink()
    with pytest.raises(CorpusError, match="damaged"):
        open_index(tmp_path)
    (tmp_path / "CURRENT").write_text("../elsewhere")
    with pytest.raises(CorpusError, match="does not name a generation"):
        open_index(tmp_path)
