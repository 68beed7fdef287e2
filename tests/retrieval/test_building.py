"""Adding to and deleting from an index: the same as building the result at once, and safe at every moment."""

import errno
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import pytest
from msgspec.structs import replace

from harness1 import config
from harness1.errors import CorpusError, SchemaError, UsageError
from harness1.records import ChunkId, DocId
from harness1.retrieval import build
from harness1.retrieval import index as index_module
from harness1.retrieval.build import add_documents, build_index, delete_documents, to_merge
from harness1.retrieval.corpus import Document
from harness1.retrieval.index import EmbeddedIndex, SegmentEntry, SegmentSize, open_index
from harness1.retrieval.models import HashEmbedder, VectorStore
from tests.support import die_at_fsync

SETTINGS = config.Index(chunk_tokens=20)
DENSE = config.Index(chunk_tokens=20, dense=config.Dense(model="hash:32"))
WORDS = [f"word{number}" for number in range(60)]


def document(rng: random.Random, number: int) -> Document:
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
    return Document(doc_id=DocId(f"d{number}"), title=rng.choice(WORDS), text=text)


def named(*words: str) -> list[Document]:
    return [Document(doc_id=DocId(f"id-{word}"), title=word.title(), text=f"About {word}.") for word in words]


def texts(index: EmbeddedIndex) -> list[str]:
    """Of all chunks that were not deleted, in corpus order."""
    return [
        segment.chunk(number).text
        for segment in index.segments
        for number in range(len(segment))
        if not segment.is_dead(number)
    ]


def search(index: EmbeddedIndex, query: str, k: int, exclude: list[str]) -> list[tuple[ChunkId, float]]:
    excluded = np.array(index.positions(map(ChunkId, exclude)), np.int64)
    found = index.bm25.search(query, k, excluded)
    return [(index.chunk(at).chunk_id, score) for at, score in found]


def nearest(index: EmbeddedIndex, text: str, k: int, dimensions: int) -> list[tuple[str, float]]:
    """By embeddings of hashed words."""
    assert index.dense is not None
    query = HashEmbedder(dimensions).embed_queries([text])
    (found,) = index.dense.search(query, [k], [np.array([], np.int64)])
    return [(index.chunk(at).chunk_id, round(score, 2)) for at, score in found]


def delete(path, *ids: str):
    return delete_documents(map(DocId, ids), path)


@pytest.mark.parametrize("seed", [1, 2])
def test_scores_do_not_depend_on_how_the_corpus_fell_into_segments(tmp_path, seed: int) -> None:
    """Random additions, replacements and deletions, with merges, against one build of what is left: equal bits."""
    rng = random.Random(seed)
    documents = {number: document(rng, number) for number in range(120)}
    build_index([documents[number] for number in range(20)], tmp_path / "grown", SETTINGS)
    at = 20
    while at < 120:
        size = rng.randint(1, 15)
        add_documents([documents[number] for number in range(at, min(120, at + size))], tmp_path / "grown")
        at += size
    replaced = rng.sample(range(120), 5)
    documents |= {number: document(rng, number) for number in replaced}
    add_documents([documents[number] for number in replaced], tmp_path / "grown")
    gone = rng.sample(range(120), 20)
    delete(tmp_path / "grown", *(f"d{number}" for number in gone))
    left = [documents[number] for number in documents if number not in gone]
    assert build_index(left, tmp_path / "whole", SETTINGS) == open_index(tmp_path / "grown").info
    grown, whole = open_index(tmp_path / "grown"), open_index(tmp_path / "whole")
    assert len(grown.segments) > 1
    assert sum(len(segment.dead) for segment in grown.segments)
    assert sorted(texts(grown)) == sorted(texts(whole))
    for _ in range(100):
        query = " ".join(rng.choices(WORDS, k=rng.randint(1, 5)))
        exclude = [f"d{rng.randrange(120)}#0" for _ in range(5)]
        for k in (1, 5, 200):
            assert search(grown, query, k, exclude) == search(whole, query, k, exclude)


def test_an_added_document_is_found_and_an_equal_id_replaces(tmp_path) -> None:
    build_index(named("sun", "moon"), tmp_path, SETTINGS)
    reader = open_index(tmp_path)
    info = add_documents([*named("star"), Document(doc_id=DocId("id-sun"), title="Sun", text="A red giant.")], tmp_path)
    index = open_index(tmp_path)
    assert (info.documents, info.chunks) == (3, 3)
    assert texts(index) == ["About moon.", "About star.", "A red giant."]
    assert [name for name, _ in search(index, "giant sun", 5, [])] == ["id-sun"]
    assert index.chunk(index.positions_of(DocId("id-sun")).start).text == "A red giant."
    assert index.chunk(index.positions([ChunkId("id-sun")])[0]).text == "A red giant."
    assert texts(reader) == ["About sun.", "About moon."]
    assert search(reader, "giant", 5, []) == []


def test_a_deleted_document_is_gone_everywhere(tmp_path) -> None:
    build_index(named("sun", "moon", "star"), tmp_path, SETTINGS)
    before = open_index(tmp_path).info
    info = delete(tmp_path, "id-moon")
    index = open_index(tmp_path)
    assert texts(index) == ["About sun.", "About star."]
    assert search(index, "moon", 5, []) == []
    assert list(index.positions_of(DocId("id-moon"))) == []
    assert index.positions([ChunkId("id-moon"), ChunkId("id-sun")]) == [0]
    assert (info.documents, info.chunks) == (2, 2)
    add_documents(named("moon"), tmp_path)
    assert open_index(tmp_path).info.index_hash == before.index_hash


def test_what_cannot_be_deleted_changes_nothing(tmp_path) -> None:
    build_index(named("sun", "moon"), tmp_path, SETTINGS)
    with pytest.raises(CorpusError, match=r"has no document 'id-mars' \(1 of 2 are not there\)"):
        delete(tmp_path, "id-sun", "id-mars")
    with pytest.raises(CorpusError, match="holds no documents"):
        delete(tmp_path, "id-sun", "id-moon")
    assert texts(open_index(tmp_path)) == ["About sun.", "About moon."]
    with pytest.raises(CorpusError, match="is not an index"):
        add_documents(named("sun"), tmp_path / "absent")


def test_segments_stay_few_and_the_mostly_dead_are_written_anew(tmp_path) -> None:
    build_index(named("w0"), tmp_path, SETTINGS)
    for number in range(1, 14):
        add_documents(named(f"w{number}"), tmp_path)
    index = open_index(tmp_path)
    assert len(index.segments) == 3
    assert texts(index) == [f"About w{number}." for number in range(14)]
    delete(tmp_path, *(f"id-w{number}" for number in range(8)))
    index = open_index(tmp_path)
    assert texts(index) == [f"About w{number}." for number in range(8, 14)]
    assert sum(len(segment.dead) for segment in index.segments) * 2 <= len(index)


@pytest.mark.parametrize("sizes", [[1, 8] * 40, [30, *[1] * 60], [64, 32, 16, 8, 4, 2, 1] * 5])
def test_segments_stay_few_whatever_comes_and_none_is_written_again_for_much_smaller_ones(sizes: list[int]) -> None:
    segments: list[SegmentEntry] = []
    written = 0
    for size in sizes:
        segments.append(SegmentEntry("", SegmentSize(size, size, size)))
        while group := to_merge(segments):
            total = sum(entry.size.chunks for entry in segments[group.start : group.stop])
            segments[group.start : group.stop] = [SegmentEntry("", SegmentSize(total, total, total))]
            written += total
    assert len(segments) <= sum(sizes).bit_length()
    assert sum(entry.size.chunks for entry in segments) == sum(sizes)
    assert written <= sum(sizes) * sum(sizes).bit_length()
    full = [SegmentEntry("", SegmentSize(size, size, size)) for size in (build.LARGEST, build.LARGEST, 1)]
    assert to_merge(full) is None


def test_a_corpus_beyond_one_segment_is_searched_as_one(tmp_path, monkeypatch) -> None:
    rng = random.Random(3)
    documents = [document(rng, number) for number in range(90)]
    build_index(documents, tmp_path / "one", DENSE)
    monkeypatch.setattr(build, "LARGEST", 40)
    build_index(documents, tmp_path / "many", DENSE)
    one, many = open_index(tmp_path / "one"), open_index(tmp_path / "many")
    assert (len(one.segments), one.info) == (1, many.info)
    assert len(many.segments) > 2
    assert all(len(segment) <= 40 + 20 for segment in many.segments)
    for query in WORDS[:20]:
        assert search(one, query, 30, ["d3#0"]) == search(many, query, 30, ["d3#0"])
    with pytest.raises(CorpusError, match="two documents have the id 'd0'"):
        build_index([*documents, documents[0]], tmp_path / "twice", DENSE)


def test_only_the_model_that_embedded_an_index_adds_to_it(tmp_path, monkeypatch) -> None:
    build_index(named("sun", "moon"), tmp_path, DENSE)
    before = open_index(tmp_path).info
    monkeypatch.setattr(build, "open_embedder", lambda *_: HashEmbedder(64))
    with pytest.raises(UsageError, match="another model"):
        add_documents(named("star"), tmp_path)
    assert open_index(tmp_path).info == before


def test_a_model_that_is_not_there_is_told_before_a_document_is_read(tmp_path) -> None:
    def documents():
        pytest.fail("the corpus was read")
        yield

    with pytest.raises(UsageError, match="no model at"):
        build_index(documents(), tmp_path, config.Index(dense=config.Dense(model="./absent")))
    assert not (tmp_path / "CURRENT").exists()


def test_deleting_and_merging_need_no_model(tmp_path, monkeypatch) -> None:
    build_index(named("sun", "moon", "star", "comet", "dust"), tmp_path, DENSE)

    def absent(*_):
        raise UsageError("there is no model")

    monkeypatch.setattr(build, "open_embedder", absent)
    delete(tmp_path, "id-sun")
    delete(tmp_path, "id-moon", "id-star")
    index = open_index(tmp_path)
    assert [len(segment.dead) for segment in index.segments] == [0]
    assert nearest(index, "Dust\nAbout dust.", 1, 32) == [("id-dust", 1.0)]


@pytest.mark.parametrize("search", ["exact", "hnsw"])
def test_embeddings_find_what_was_added_and_not_what_was_deleted(tmp_path, monkeypatch, search: str) -> None:
    build_index(named(*WORDS), tmp_path, config.Index(dense=config.Dense(model="hash:4096", search=search)))
    with monkeypatch.context() as patch:
        patch.setattr(faiss, "IndexHNSWSQ", None)  # the graph grows, and is not made anew
        add_documents(named("star", "comet"), tmp_path)
    for word in ("star", "word9"):
        assert nearest(open_index(tmp_path), f"{word.title()}\nAbout {word}.", 1, 4096) == [(f"id-{word}", 1.0)]
    delete(tmp_path, "id-word7")
    found = nearest(open_index(tmp_path), "word7", 60, 4096)
    assert len(found) == 60
    assert "id-word7" not in dict(found)


def test_only_new_texts_are_embedded(tmp_path, monkeypatch) -> None:
    """In an addition, and in a new build of the same folder with other settings for terms."""
    fresh: list[int] = []

    def watch(_: int, new: int) -> None:
        fresh.append(new)

    build_index(named("sun", "moon"), tmp_path, DENSE, watch)
    add_documents(named("star", "sun"), tmp_path, watch)
    build_index(named("sun", "moon", "star"), tmp_path, config.Index(chunk_tokens=99, dense=DENSE.dense), watch)
    assert sum(fresh) == 3
    index = open_index(tmp_path)
    (store,) = (tmp_path / "vectors").iterdir()
    assert len(VectorStore(store, 32)) == index.vectors.rows == 3


@pytest.mark.parametrize(
    ("step", "after"),
    [
        (lambda path: add_documents(named("star"), path), ["About sun.", "About moon.", "About star."]),
        (lambda path: delete(path, "id-sun"), ["About moon."]),
        (lambda path: build_index(named("star", "moon"), path, DENSE), ["About star.", "About moon."]),
    ],
    ids=["add", "delete", "build"],
)
def test_a_killed_change_leaves_the_index_before_it_or_after_it(tmp_path, step, after: list[str]) -> None:
    outcomes = []
    for fsyncs in range(0, 100, 11):
        path = tmp_path / str(fsyncs)
        build_index(named("sun", "moon"), path, DENSE)
        status = die_at_fsync(partial(step, path), fsyncs)
        index = open_index(path)
        outcomes.append(texts(index))
        assert index.dense is not None
        assert [name for name, _ in search(index, "moon", 5, [])] == ["id-moon"]
        add_documents(named("comet"), path)
        assert texts(open_index(path)) == [*outcomes[-1], "About comet."]
        assert not list(path.glob(".build-*"))
        if not os.WIFSIGNALED(status):
            break
    assert outcomes[0] == ["About sun.", "About moon."]
    assert outcomes[-1] == after
    assert all(outcome in (outcomes[0], after) for outcome in outcomes)


SMALL = config.Index(chunk_tokens=8)
LONG = "The first sentence is here. The second one is there. The third is last."


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
    info = build_index(documents, tmp_path, SMALL)
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
    sun, moon = named("sun", "moon")
    moved = [replace(sun, title="Moon"), replace(moon, title="Sun")]
    builds = (([sun, moon], SMALL), (moved, SMALL), ([sun, moon], config.Index(chunk_tokens=9)))
    assert len({build_index(documents, tmp_path, settings).index_hash for documents, settings in builds}) == 3


def test_a_reader_keeps_its_generation_while_later_ones_replace_it(tmp_path) -> None:
    build_index(named("sun"), tmp_path, SMALL)
    reader = open_index(tmp_path)
    for word in ("moon", "star", "comet"):
        build_index(named(word), tmp_path, SMALL)
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
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "one")], check=True, env=environment)
    documents = [Document(DocId(str(n)), f"T{n % 5}", f"winter stone word{n % 7} river") for n in range(40)]
    build_index(documents, tmp_path / "two", config.Index())
    found = []
    for out in (tmp_path / "one", tmp_path / "two"):
        files = [file for file in (out / "gen-000001").rglob("*") if file.is_file()]
        found.append({str(file.relative_to(out)): file.read_bytes() for file in files})
    assert found[0] == found[1]
    best = open_index(tmp_path / "one").bm25.search("winter stone word3", 12)
    assert [position for position, _ in best] == [10, 17, 24, 3, 31, 38, 0, 1, 11, 12, 13, 14]


def test_opening_while_generations_are_published_takes_the_newer_one(tmp_path, monkeypatch) -> None:
    for word in ("sun", "moon"):
        build_index(named(word), tmp_path, SMALL)
    gone = tmp_path / "gen-000000"
    answers = [gone, tmp_path / "gen-000002"]
    monkeypatch.setattr(index_module, "current_generation", lambda _: answers.pop(0) if answers[1:] else answers[0])
    assert open_index(tmp_path).chunk(0).text == "About moon."


def test_small_segments_hold_no_files_open(tmp_path) -> None:
    build_index(named("sun", "moon"), tmp_path, SMALL)
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = open_index(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 1
    assert reader.bm25.search("sun", 3)


def test_too_many_open_files_are_not_called_damage(tmp_path, monkeypatch) -> None:
    build_index(named("sun"), tmp_path, SMALL)

    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(index_module.Files, "load", refuse)
    with pytest.raises(CorpusError, match="ulimit -n"):
        open_index(tmp_path)


def test_a_build_that_fails_leaves_the_earlier_index_and_no_litter_and_two_do_not_meet(tmp_path) -> None:
    def documents():
        yield from named("moon")
        with pytest.raises(UsageError, match="another build is at work"):
            build_index(named("star"), tmp_path, SMALL)
        raise CorpusError("line 2 is broken")

    build_index(named("sun"), tmp_path, SMALL)
    with pytest.raises(CorpusError, match="line 2 is broken"):
        build_index(documents(), tmp_path, SMALL)
    assert contents(tmp_path)[0][4] == "About sun."
    assert {path.name for path in tmp_path.iterdir()} == {"CURRENT", ".lock", "gen-000001"}


def test_ids_that_would_collide_are_refused(tmp_path) -> None:
    clash = [Document(doc_id=DocId("a"), title="", text=LONG), Document(doc_id=DocId("a#1"), title="", text="x")]
    with pytest.raises(CorpusError, match=r"'a#1' is the id of a document, and of a chunk of the longer document 'a'"):
        build_index(clash, tmp_path, SMALL)
    with pytest.raises(CorpusError, match="two documents have the id 'id-sun'"):
        build_index(named("sun", "moon", "sun"), tmp_path, SMALL)
    with pytest.raises(CorpusError, match="no documents"):
        build_index([], tmp_path, SMALL)
    build_index(clash[:1], tmp_path, SMALL)
    with pytest.raises(CorpusError, match="'a#1' is the id of a chunk of another document"):
        add_documents(clash[1:], tmp_path)


@pytest.mark.parametrize("step", ["fsync", "posix_fallocate"])
def test_a_full_disk_is_a_clear_error_and_the_earlier_index_stays(tmp_path, monkeypatch, step: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    build_index(named("sun"), tmp_path, SMALL)
    monkeypatch.setattr(os, step, full)
    with pytest.raises(CorpusError, match=r"cannot build an index at .*No space left on device"):
        build_index(named("moon"), tmp_path, SMALL)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "CURRENT", "gen-000001"}
    assert open_index(tmp_path).chunk(0).text == "About sun."


def test_a_path_that_cannot_be_a_folder_is_a_clear_error(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CorpusError, match="cannot build an index"):
            build_index(named("sun"), path, SMALL)
        with pytest.raises(CorpusError, match="is not an index; one is built there by: harness1 index SOURCE --out"):
            open_index(path)


def test_a_newer_index_and_a_damaged_one_are_told_apart(tmp_path) -> None:
    build_index(named("sun"), tmp_path, SMALL)
    manifest = tmp_path / "gen-000001" / "index.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"format": 99, "unknown": 1}))
    with pytest.raises(SchemaError, match="format 99"):
        open_index(tmp_path)
    for told, damaged in (("earlier format 1", json.dumps(fields | {"format": 1})), ("damaged", "[" * 100_000)):
        manifest.write_text(damaged)
        with pytest.raises(CorpusError, match=told):
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
