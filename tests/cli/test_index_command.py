"""`harness1 index` and what follows from it, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import harness1

HASHED = ("--set", "index.dense.model=hash:128")


def write_corpus(path: Path, **texts: str) -> None:
    rows = ({"_id": name, "title": name.title(), "text": text} for name, text in texts.items())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "old.jsonl", sun="The sun is a star.", moon="The moon circles the earth.")
    write_corpus(tmp_path / "new.jsonl", moon="The moon is made of rock.", mars="Mars is a red planet.")
    return tmp_path


def info(*arguments: str, cwd: Path) -> dict[str, str | int]:
    done = harness1("index", *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_documents_come_and_go_and_the_hash_says_what_is_there(folder: Path) -> None:
    built = info("old.jsonl", "--out", "at", cwd=folder)
    grown = info("new.jsonl", "--out", "at", "--add", cwd=folder)
    assert (built["documents"], grown["documents"]) == (2, 3)
    write_corpus(
        folder / "all.jsonl", sun="The sun is a star.", moon="The moon is made of rock.", mars="Mars is a red planet."
    )
    assert info("all.jsonl", "--out", "whole", cwd=folder)["index_hash"] == grown["index_hash"]
    write_corpus(folder / "one.jsonl", sun="The sun is a star.")
    left = info("--out", "at", "--delete", "moon", "--delete", "mars", cwd=folder)
    assert left["index_hash"] == info("one.jsonl", "--out", "single", cwd=folder)["index_hash"]
    assert info("old.jsonl", "--out", "at", cwd=folder)["index_hash"] == built["index_hash"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["old.jsonl"], "--out DIR, or --engine SPEC"),
        (["--out", "x"], "say what to index"),
        (["old.jsonl", "--out", "x", "--delete", "sun"], "--delete takes ids alone"),
        (["new.jsonl", "--out", "absent", "--add"], "is not an index"),
        (["--out", "absent", "--delete", "sun"], "is not an index"),
        (["old.jsonl", "--engine", "lucene:x"], "lucene"),
        (["old.jsonl", "--engine", "milvus:x.db", "--out", "x"], "neither --out"),
        (["old.jsonl", "--out", "x", "--set", "index.dense.model=hash:no"], "hash:256"),
        (["old.jsonl", "--out", "x", "--set", "index.dense.model=./nothing"], "nothing"),
    ],
)
def test_wrong_use_is_one_line_and_leaves_no_index(folder: Path, arguments: list[str], complaint: str) -> None:
    done = harness1("index", *arguments, cwd=folder)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(folder.glob("*/CURRENT"))


@pytest.mark.parametrize("wrong", [["--set", "index.chunk_tokens=99"], ["--force"]])
def test_settings_of_an_index_are_not_changed_by_adding(folder: Path, wrong: list[str]) -> None:
    info("old.jsonl", "--out", "at", cwd=folder)
    for change in (["new.jsonl", "--add"], ["--delete", "sun"]):
        done = harness1("index", *change, "--out", "at", *wrong, cwd=folder)
        assert (done.returncode, "leave index.* and --force out" in done.stderr) == (2, True)


def test_a_change_that_fails_leaves_a_finished_index(folder: Path) -> None:
    info("old.jsonl", "--out", "at", cwd=folder)
    assert harness1("index", "--out", "at", "--delete", "nothing", cwd=folder).returncode == 2
    (folder / "torn.jsonl").write_text('{"id": ')
    assert harness1("index", "torn.jsonl", "--out", "at", "--add", cwd=folder).returncode == 2
    assert json.loads((folder / "at" / "stage.json").read_text())["status"] == "finished"
    info("old.jsonl", "--out", "at", cwd=folder)
    assert [path.name for path in (folder / "at").glob("gen-*")] == ["gen-000001"]


def test_an_index_with_embeddings_is_searched_by_both(folder: Path) -> None:
    info("old.jsonl", "--out", "both", *HASHED, cwd=folder)
    found = harness1("search", "moon", "--index", "both", "--policy", "single-shot", "--json", cwd=folder)
    assert json.loads(found.stdout)["curated"][0]["id"] == "moon", found.stderr
    info("old.jsonl", "--out", "terms", cwd=folder)
    wanting = harness1("search", "moon", "--index", "terms", "--set", "env.retrieval.mode=hybrid", cwd=folder)
    assert (wanting.returncode, "needs an index with embeddings" in wanting.stderr) == (2, True)
    unnamed = harness1("search", "moon", "--index", "both", "--set", "env.retrieval.rerank.on=true", cwd=folder)
    assert (unnamed.returncode, "machine.reranker" in unnamed.stderr) == (2, True)


def test_ranking_settings_make_another_run(folder: Path) -> None:
    info("old.jsonl", "--out", "both", *HASHED, cwd=folder)
    for mode in ("hybrid", "bm25", "dense"):
        done = harness1(
            "search", "moon", "--index", "both", "--set", f"env.retrieval.mode={mode}", "--json", cwd=folder
        )
        assert done.returncode == 0, done.stderr
    assert len(list((folder / "runs").iterdir())) == 3


def test_a_check_names_the_damaged_file(folder: Path) -> None:
    info("world:300", "--out", "at", cwd=folder)
    whole = harness1("index", "check", "at", cwd=folder)
    assert (whole.returncode, "all as they were written" in whole.stdout) == (0, True), whole.stderr
    path = folder / "at" / "gen-000001" / "segment-000001" / "contents.bin"
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    done = harness1("index", "check", "at", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "")
    assert "segment-000001/contents.bin: the bytes are not those" in done.stdout
    (damage,) = json.loads(harness1("index", "check", "--json", "at", cwd=folder).stdout)["damaged"]
    assert damage["file"] == "segment-000001/contents.bin"
    missing = harness1("index", "check", "old.jsonl", cwd=folder)
    assert (missing.returncode, "is not an index" in missing.stderr) == (2, True)


def test_no_index_is_built_over_a_run(folder: Path) -> None:
    info("old.jsonl", "--out", "of-run", cwd=folder)
    assert harness1("search", "sun", "--index", "of-run", "--out", "kept", cwd=folder).returncode == 0
    for force in ((), ("--force",)):
        done = harness1("index", "old.jsonl", "--out", "kept", *force, cwd=folder)
        assert (done.returncode, "kept is not empty and holds no index" in done.stderr) == (2, True), done.stderr
    assert harness1("replay", "kept", cwd=folder).stdout.startswith("1 episode,")


def test_the_reading_of_an_index_is_said_where_it_is_not_english(folder: Path) -> None:
    write_corpus(folder / "ja.jsonl", tower="東京タワーは1958年に完成した。", fuji="富士山は日本の山である。")
    said = [
        harness1("index", *arguments, cwd=folder).stdout
        for arguments in (
            ("old.jsonl", "--out", "en"),
            ("ja.jsonl", "--out", "ja"),
            ("old.jsonl", "--out", "de", "--set", "index.language=german"),
            ("old.jsonl", "--out", "none", "--set", "index.language=none"),
        )
    ]
    assert ";" not in said[0]
    assert [line.partition("; ")[2].strip() for line in said[1:]] == [
        "stemmed by script",
        "stemmed as german",
        "not stemmed",
    ]
    found = harness1("search", "富士山はどこ", "--index", "ja", cwd=folder)
    assert "Fuji" in found.stdout
    refused = harness1("index", "old.jsonl", "--out", "x", "--set", "index.language=klingon", cwd=folder)
    assert refused.returncode == 2
    assert "give one of auto, none, arabic" in refused.stderr
