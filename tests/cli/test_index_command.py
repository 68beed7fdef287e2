"""`harness1 index` and what follows from it, as a user meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Command

HASHED = ("--set", "index.dense.model=hash:128")


def write_corpus(path: Path, **texts: str) -> None:
    rows = ({"_id": name, "title": name.title(), "text": text} for name, text in texts.items())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "old.jsonl", sun="The sun is a star.", moon="The moon circles the earth.")
    write_corpus(tmp_path / "new.jsonl", moon="The moon is made of rock.", mars="Mars is a red planet.")
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


def info(harness1: Command, *arguments: str) -> dict[str, str | int]:
    done = harness1("index", *arguments, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def test_documents_come_and_go_and_the_hash_says_what_is_there(harness1: Command, home: Path) -> None:
    built = info(harness1, "old.jsonl", "--out", "at")
    grown = info(harness1, "new.jsonl", "--out", "at", "--add")
    assert (built["documents"], grown["documents"]) == (2, 3)
    write_corpus(
        home / "all.jsonl", sun="The sun is a star.", moon="The moon is made of rock.", mars="Mars is a red planet."
    )
    assert info(harness1, "all.jsonl", "--out", "whole")["index_hash"] == grown["index_hash"]
    write_corpus(home / "one.jsonl", sun="The sun is a star.")
    left = info(harness1, "--out", "at", "--delete", "moon", "--delete", "mars")
    assert left["index_hash"] == info(harness1, "one.jsonl", "--out", "single")["index_hash"]
    assert info(harness1, "old.jsonl", "--out", "at")["index_hash"] == built["index_hash"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["old.jsonl"], "--out DIR"),
        (["--out", "x"], "say what to index"),
        (["old.jsonl", "--out", "x", "--delete", "sun"], "--delete takes ids alone"),
        (["empty.jsonl", "--out", "x"], "no documents"),
        (["new.jsonl", "--out", "absent", "--add"], "is not an index"),
        (["--out", "absent", "--delete", "sun"], "is not an index"),
        (["old.jsonl", "--out", "x", "--set", "index.dense.model=hash:no"], "hash:256"),
        (["old.jsonl", "--out", "x", "--set", "index.dense.model=./nothing"], "nothing"),
    ],
)
def test_wrong_use_is_one_line_and_leaves_no_index(
    harness1: Command, home: Path, arguments: list[str], complaint: str
) -> None:
    done = harness1("index", *arguments)
    assert done.code == 2
    assert complaint in done.err
    assert done.err.count("\n") == 1
    assert not list(home.glob("*/CURRENT"))


@pytest.mark.slow
def test_where_nothing_can_be_written_the_search_is_compiled_in_memory_with_one_line(home: Path) -> None:
    nowhere = "import numba.core.caching as caching; caching.CacheImpl._locator_classes = []; "
    run = "import sys; from harness1.cli.main import run; sys.argv[1:] = ['index', 'old.jsonl', '--out', 'at']; run()"
    done = subprocess.run([sys.executable, "-c", nowhere + run], cwd=home, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("compiled anew each time")) == (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert (home / "at" / "CURRENT").exists()


def test_settings_of_an_index_are_not_changed_by_adding(harness1: Command) -> None:
    info(harness1, "old.jsonl", "--out", "at")
    adding, other = ("new.jsonl", "--add"), ("--set", "index.chunk_tokens=99")
    for change, wrong in ((adding, other), (("--delete", "sun"), ("--force",))):
        done = harness1("index", *change, "--out", "at", *wrong)
        assert (done.code, "leave index.* and --force out" in done.err) == (2, True)


def test_a_change_that_fails_leaves_a_finished_index(harness1: Command, home: Path) -> None:
    info(harness1, "old.jsonl", "--out", "at")
    card = (home / "at" / "stage.json").read_text()
    for change in (("empty.jsonl", "--add"), ("--delete", "nothing")):
        assert harness1("index", *change, "--out", "at").code == 2
        assert (home / "at" / "stage.json").read_text() == card


def test_an_index_with_embeddings_is_searched_by_both(harness1: Command, home: Path) -> None:
    info(harness1, "old.jsonl", "--out", "both", *HASHED)
    found = harness1("search", "moon", "--index", "both", "--policy", "single-shot", "--json")
    assert json.loads(found.out)["curated"][0]["id"] == "moon", found.err
    info(harness1, "old.jsonl", "--out", "terms")
    wanting = harness1("search", "moon", "--index", "terms", "--set", "env.retrieval.mode=hybrid")
    assert (wanting.code, "needs an index with embeddings" in wanting.err) == (2, True)
    unnamed = harness1("search", "moon", "--index", "both", "--set", "env.retrieval.rerank.on=true")
    assert (unnamed.code, "machine.reranker" in unnamed.err) == (2, True)


def test_a_check_names_the_damaged_file(harness1: Command, home: Path) -> None:
    info(harness1, "world:300", "--out", "at")
    whole = harness1("index", "check", "at")
    assert (whole.code, "all as they were written" in whole.out) == (0, True), whole.err
    path = home / "at" / "gen-000001" / "segment-000001" / "contents.bin"
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    done = harness1("index", "check", "at")
    assert (done.code, done.err) == (2, "")
    assert "segment-000001/contents.bin: the bytes are not those" in done.out
    (damage,) = json.loads(harness1("index", "check", "--json", "at").out)["damaged"]
    assert damage["file"] == "segment-000001/contents.bin"
    missing = harness1("index", "check", "old.jsonl")
    assert (missing.code, "is not an index" in missing.err) == (2, True)


def test_the_stemming_of_an_index_is_said_where_it_is_not_by_script(harness1: Command, home: Path) -> None:
    write_corpus(home / "ja.jsonl", tower="東京タワーは1958年に完成した。", fuji="富士山は日本の山である。")
    for source, language, said in (
        ("old", "auto", ""),
        ("ja", "auto", ""),
        ("old", "german", "stemmed as german"),
        ("old", "none", "not stemmed"),
    ):
        made = harness1("index", f"{source}.jsonl", "--out", source + language, "--set", f"index.language={language}")
        assert made.out.partition("; ")[2].strip() == said
    assert "Fuji" in harness1("search", "富士山はどこ", "--index", "jaauto").out
    refused = harness1("index", "old.jsonl", "--out", "x", "--set", "index.language=klingon")
    assert (refused.code, "give one of auto, none, arabic" in refused.err) == (2, True)


def test_a_file_in_place_of_the_folder_is_refused_in_a_line_and_stays(harness1: Command, home: Path) -> None:
    ended = harness1("index", "old.jsonl", "--out", "empty.jsonl")
    assert (ended.code, ended.err) == (2, "harness1: empty.jsonl: Not a directory\n")
    assert (home / "empty.jsonl").read_text() == ""


def test_a_password_is_not_repeated_where_no_address_is_taken(harness1: Command) -> None:
    place = "http://me:s3cret@host/x"
    for words in (
        ["index", place, "--out", "at"],
        ["data", "check", place],
        ["view", place],
        ["push", place, "--to", "a/b"],
    ):
        ended = harness1(*words)
        assert (ended.code, "s3cret" in ended.err, "***@host" in ended.err) == (2, False, True), ended.err
