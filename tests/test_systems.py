"""The table of all systems: paired with the script, cut to its size, and honest about what does not help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import systems
from harness1.config import Env
from harness1.eval.ablations import ABLATIONS
from harness1.eval.run import read_run
from tests.eval.run_folders import dataset, episode, run_folder


def row(low: float, high: float, p: float = 1.0) -> dict[str, Any]:
    middle = (low + high) / 2
    return {"difference": [middle, low, high], "p": p, "differences": [middle, middle]}


def test_every_mechanism_is_taken_away_from_the_same_base() -> None:
    found = systems.systems()
    assert next(iter(found)) == systems.BASE
    without = {name for name in found if name.startswith("without ")}
    on = {name for name, removed in ABLATIONS.items() if removed(Env()) != Env()}
    assert without == {f"without {name}" for name in on - {"all_off"}}
    assert {"without dedup", "without rank"} <= without
    assert {"all off", "transcript harness"} <= found.keys()
    modes = {each.config.env.retrieval.mode for each in found.values() if not each.is_single}
    assert modes == {"bm25"}
    environments = {name: each.config.env for name, each in found.items()}
    assert len({repr(env) for env in environments.values()}) == len(environments)


def test_a_search_is_compared_with_the_script_at_equal_size(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", {"t": "?"}, gold="b")
    script, other, small = (
        read_run(run_folder(tmp_path / found, data, [episode("t", found, turns=1)])) for found in ("xb", "axb", "a")
    )
    runs = dict.fromkeys(systems.systems(), other) | {systems.BASE: script, "single search, dense": small}
    rows = systems.compared(runs)
    assert (rows["single search, bm25"]["set_size"], rows["single search, bm25"]["recall"][0]) == (2, 0.0)
    assert rows["single search, bm25"]["difference"][0] == -1.0
    assert rows["single search, dense"]["difference"][0] == 0.0  # of one document each
    assert (rows["without dedup"]["set_size"], rows["without dedup"]["recall"][0]) == (3, 1.0)


@pytest.mark.service
def test_one_command_makes_the_table_and_does_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["world:40", "--indexes", str(tmp_path / "indexes"), "--out", str(tmp_path / "runs"), "--limit", "2"]
    report = systems.main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert report["systems"]["world-40-0"].keys() == systems.systems().keys()
    episodes = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("episodes.jsonl")}
    assert len(episodes) == len(systems.systems())
    systems.main(arguments)
    table = capsys.readouterr().out
    assert "Difference from `scripted`" in table
    assert "- without dedup: no difference on world-40-0." in table
    assert episodes == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("episodes.jsonl")}
