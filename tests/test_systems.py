"""The table of all systems: paired with the script, cut to its size, and honest about what does not help."""

import json
from pathlib import Path

import pytest

from benchmarks import systems
from harness1.config import Env
from harness1.eval.ablations import ABLATIONS


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
