"""The table of what the harness ranks and leads to: what it plays, compares and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import evidence_table
from benchmarks.evidence_table import PAIRS, SYSTEMS
from harness1.data.open import open_source

WORLD, LIMIT = "world:150", 3


def arguments(folder: Path, *more: str) -> list[str]:
    named = ["--indexes", str(folder / "indexes"), "--out", str(folder / "sets"), "--model", "hash:32"]
    return [WORLD, "--limit", str(LIMIT), *named, *more]


def test_every_system_is_played_in_both_modes_and_compared_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evidence_table.main(arguments(tmp_path, "--json"))
    assert json.loads(capsys.readouterr().out) == report
    for mode in ("bm25", "hybrid"):
        (row,) = report[mode]["datasets"].values()
        assert row["tasks"] == LIMIT
        assert list(row["systems"]) == list(SYSTEMS)
        assert list(row["differences"]) == [f"{one} - {two}" for one, two in PAIRS]
        for measures in row["systems"].values():
            assert {"R@15", "nDCG@10", "F1@2", "F1@3", "F1@5", "size"} == measures.keys()
            assert all(0 <= low <= mean <= high for mean, low, high in measures.values())
    assert report["hybrid"]["datasets"][WORLD]["systems"]["populated"]["size"][0] <= 8


def test_what_was_played_is_not_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = ("--modes", "bm25", "--systems", "script", "before")
    first = evidence_table.main(arguments(tmp_path, *systems))
    assert "is done" in capsys.readouterr().err
    assert evidence_table.main(arguments(tmp_path, *systems)) == first
    assert "is done" not in capsys.readouterr().err


def test_the_larger_set_is_cut_before_two_are_compared() -> None:
    task = open_source(WORLD).tasks("test")[0]
    assert task.gold is not None
    gold = str(next(iter(task.gold.relevant)))
    late = {task.task_id: ["x", "y", gold]}
    early = {task.task_id: [gold]}
    cut = evidence_table._difference([task], late, early)
    assert cut["tasks"] == [-1 / len(task.gold.relevant)]
