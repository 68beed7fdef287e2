"""Documents that cannot be read, as a user of the commands meets them."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Command
from tests.eval.run_folders import write_beir

GOOD = '{"_id": "good", "text": "The sun is a star."}\n'


def test_a_broken_line_is_left_out_of_an_index_and_named(harness1: Command) -> None:
    Path("docs.jsonl").write_text("broken\n" * 25 + GOOD)
    ended = harness1("index", "docs.jsonl", "--out", "at")
    assert ended.code == 0
    assert "docs.jsonl:1: not a JSON object" in ended.err
    assert "25 left out of docs.jsonl" in ended.err
    assert "and 5 more" in ended.err
    assert ended.out.endswith("; 25 left out\n")
    assert harness1("index", "docs.jsonl", "--out", "at").out == ended.out, "it is told again, when there is no work"


def test_strict_ends_with_the_first_place_even_if_an_index_is_there(harness1: Command) -> None:
    Path("docs.jsonl").write_text(GOOD + '{"_id": "deep", "text": ' + "[" * 100_000 + "\n")
    assert harness1("index", "docs.jsonl", "--out", "at").code == 0
    for out in ("at", "fresh"):
        ended = harness1("index", "docs.jsonl", "--out", out, "--strict")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("harness1: docs.jsonl:2: not a JSON object")
        assert ended.err.count("\n") == 1


def test_kinds_that_are_not_read_and_copies_are_told_wherever_one_looks(harness1: Command) -> None:
    Path("notes").mkdir()
    for name in ("a.txt", "b.md"):
        Path("notes", name).write_text("The sun is a star.")
    for name in ("c.heic", "d.HEIC"):
        Path("notes", name).write_bytes(b"\0\1")
    ended = harness1("index", "notes", "--out", "at")
    assert ended.err.splitlines()[-2:] == [
        "harness1: 2 files of 1 kind were not read (.heic 2)",
        "harness1: 1 file with the text of another: b.md is a.txt",
    ]
    assert ended.out.endswith("; 2 files not read\n")
    assert harness1("index", "notes", "--out", "at").out == ended.out, "it is told again, when there is no work"
    told = json.loads(harness1("index", "notes", "--out", "at", "--json").out)
    assert (told["unread"], told["copies"], told["left_out"]) == ({".heic": 2}, {"a.txt": ["b.md"]}, 0)
    refused = harness1("index", "notes", "--out", "at", "--strict")
    assert (refused.code, refused.err) == (2, "harness1: notes: 2 files of 1 kind were not read (.heic 2)\n")
    Path("one.md").write_text("Jupiter is a planet.")
    assert json.loads(harness1("index", "one.md", "--out", "at", "--add", "--json").out)["unread"] == {".heic": 2}
    (found,) = json.loads(harness1("search", "sun", "--index", "at", "--json").out)["curated"]
    assert found["copies"] == ["b.md"]
    assert "also b.md" in harness1("search", "sun star", "--index", "at").out
    assert json.loads(harness1("index", "one.md", "--out", "own", "--json").out)["documents"] == 1
    (found,) = json.loads(harness1("search", "planet", "--index", "own", "--json").out)["curated"]
    assert found["path"] == str(Path("one.md").resolve())


def test_an_evaluation_never_leaves_documents_out(harness1: Command) -> None:
    write_beir(Path("set"), [], {"q": "What is the sun?"}, {"good": 1}, "test")
    Path("set/corpus.jsonl").write_text(GOOD + "broken\n")
    ended = harness1("eval", "set", "--cache", "cache", "--out", "run")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith("harness1: set/corpus.jsonl:2: not a JSON object")


@pytest.mark.parametrize("text", [b"\xff", b"a = " + b"[" * 5000, b"a" + b".a" * 500_000 + b" = 1"])
def test_a_configuration_that_is_not_toml_is_refused_in_a_line(harness1: Command, text: bytes) -> None:
    Path("c.toml").write_bytes(text)
    ended = harness1("config", "show", "--config", "c.toml")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("harness1: c.toml is ")


@pytest.mark.parametrize("value", ["\udcff", "nan"])
def test_an_override_that_is_not_toml_is_refused_in_a_line(harness1: Command, value: str) -> None:
    ended = harness1("config", "show", "--set", f"reward.outcome={value}")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
