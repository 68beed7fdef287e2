"""`harness1 eval --rescore`, and what `harness1 replay` says about lines without digests."""

import json
from pathlib import Path

import msgspec

from harness1.runs.files import read_stage
from harness1.runs.journal import without_digest
from tests.cli.commands import Command
from tests.eval.run_folders import dataset

QUERIES = {"t1": "text a", "t2": "text b"}
EVAL = ["eval", "data", "--out", "run", "--cache", "cache", "--set", "machine.workers=1"]


def test_a_replay_counts_lines_without_digests(harness1: Command, home: Path) -> None:
    dataset(home / "data", QUERIES)
    assert harness1(*EVAL).code == 0
    record = home / "run" / "episodes.jsonl"
    record.write_bytes(b"".join(without_digest(line)[0] + b"\n" for line in record.read_bytes().splitlines()))
    ended = harness1("replay", "run")
    assert (ended.code, "lost its digest" in ended.err, ended.err.count("\n")) == (2, True, 1)
    stage = read_stage(home / "run")
    old = {name: value for name, value in stage.outputs.items() if name != "lines"}
    msgspec.structs.replace(stage, outputs=old).write(home / "run")
    assert "2 recorded without digests" in harness1("replay", "run").out
    assert json.loads(harness1("replay", "run", "--json").out)["undigested"] == 2
