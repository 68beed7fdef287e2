"""Rollouts fused by reciprocal rank, with ranks and sums worked out by hand."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import load_config
from harness1.errors import UsageError
from harness1.eval.compare.comparison import compare
from harness1.eval.fusion import Fusion, fuse, write_fused
from harness1.eval.run_view import read_run
from harness1.records import Episode, Status, StopReason, UnitId
from harness1.runs.folder import METRICS, RESOURCES, TASKS
from harness1.runs.stage import read_stage
from harness1.viewer.report import ensure_report
from tests.eval.run_folders import CONFIG, dataset, episode, run_folder

QUERIES = {"t1": "First?", "t2": "Second?"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return dataset(tmp_path / "data", QUERIES)


def fused(tmp_path: Path, data: Path, *rollouts: Episode, **options: Any) -> Episode:
    """The fused episode of rollouts of t1, which are numbered here."""
    numbered = [msgspec.structs.replace(each, sample_idx=number) for number, each in enumerate(rollouts)]
    folder = run_folder(tmp_path / "run", data, numbered, tasks=["t1"], samples=len(numbered))
    (found,) = fuse([read_run(folder)], **options).episodes
    return found


def delivered(found: Episode) -> str:
    return "".join(entry.unit_id for entry in found.curated)


def test_units_are_ranked_by_reciprocal_ranks_and_ties_by_id(tmp_path: Path, data: Path) -> None:
    # b has 1/62 + 1/61, a has 1/61, d and c both have 1/62 + 1/63, though d comes first in a rollout.
    found = fused(tmp_path, data, episode("t1", "abd"), episode("t1", "bce"), episode("t1", "xdc"))
    assert delivered(found) == "bcdaxe"
    assert [entry.rank for entry in found.curated] == [1, 2, 3, 4, 5, 6]


def test_k_decides_how_much_a_first_rank_stands_out(tmp_path: Path, data: Path) -> None:
    rollouts = (episode("t1", "axc"), episode("t1", "bzc"))
    assert delivered(fused(tmp_path / "high", data, *rollouts)) == "cabxz"  # 2/63 > 1/61
    assert delivered(fused(tmp_path / "low", data, *rollouts, k=1)) == "abcxz"  # 2/4 = 1/2, then by id


def test_a_unit_has_its_most_important_tag(tmp_path: Path, data: Path) -> None:
    found = fused(tmp_path, data, episode("t1", "ab", tags="lf"), episode("t1", "ba", tags="vh"))
    assert {entry.unit_id: entry.tag for entry in found.curated} == {"a": "high", "b": "very_high"}


def test_the_cap_bounds_the_set_and_the_pool_is_everything_seen(tmp_path: Path, data: Path) -> None:
    found = fused(tmp_path, data, episode("t1", "ab", pool="abc"), episode("t1", "bd", pool="dbe"), cap=2)
    assert delivered(found) == "ba"
    assert found.pool == tuple("abcde")
    assert found.turns == ()


def test_a_near_duplicate_that_another_rollout_pooled_is_no_alias(tmp_path: Path, data: Path) -> None:
    hidden = {UnitId("y"): UnitId("a"), UnitId("z"): UnitId("a")}
    found = fused(tmp_path, data, episode("t1", "a", aliases=hidden), episode("t1", "z"))
    assert found.aliases == {"y": "a"}
    assert found.pool == ("a", "z")


def test_a_failed_rollout_delivers_nothing_but_has_seen(tmp_path: Path, data: Path) -> None:
    failed = episode("t1", "xy", stop=StopReason.FORMAT_LIMIT)
    found = fused(tmp_path / "one", data, failed, episode("t1", "a"))
    assert (delivered(found), found.pool, found.status) == ("a", tuple("xya"), Status.COMPLETED)
    assert fused(tmp_path / "both", data, failed, failed).status is Status.POLICY_ERROR


def test_rollouts_that_the_infrastructure_broke_take_no_part(tmp_path: Path, data: Path) -> None:
    broken = episode("t1", "xy", stop=StopReason.FAULT)
    found = fused(tmp_path / "one", data, broken, episode("t1", "a"))
    assert (delivered(found), found.pool) == ("a", ("a",))
    lost = fused(tmp_path / "both", data, broken, broken)
    assert (lost.status, lost.reward, lost.curated) == (Status.INFRA_ERROR, None, ())


def two_runs(tmp_path: Path, data: Path) -> tuple[Fusion, list[Any]]:
    first = run_folder(tmp_path / "a", data, [episode("t1", "ax", turns=2), episode("t2", "b", turns=1)])
    second = run_folder(tmp_path / "b", data, [episode("t1", "xb", turns=3), episode("t2", "y")], policy="other")
    views = [read_run(first), read_run(second)]
    return fuse(views), views


def test_a_fused_run_is_a_run_folder_that_says_what_it_is_made_of(tmp_path: Path, data: Path) -> None:
    fusion, views = two_runs(tmp_path, data)
    metrics = write_fused(fusion, views, tmp_path / "fused")
    stage = read_stage(tmp_path / "fused")
    assert stage is not None
    assert (stage.status, stage.outputs["policy"]) == ("finished", "fused:by-hand+other")
    assert [source["policy"] for source in stage.inputs["fused"]] == ["policy", "policy"]
    assert stage.outputs["sources"] == [str(tmp_path / name) for name in "ab"]
    assert stage.inputs["policy"] not in ("policy", "other")
    # x, a and b are found for t1, b and y for t2: recall 1 and 1/2.
    assert metrics["curated_recall"]["mean"] == 0.75
    found = compare([views[0], read_run(tmp_path / "fused")]).others[0]
    assert (found.metrics["curated_recall"].first, found.metrics["curated_recall"].second) == (0.5, 0.75)


def test_what_rollouts_took_is_told_as_their_sum_everywhere(tmp_path: Path, data: Path) -> None:
    fusion, views = two_runs(tmp_path, data)
    out = tmp_path / "fused"
    write_fused(fusion, views, out)
    metrics = msgspec.json.decode((out / METRICS).read_bytes())
    assert (metrics["turns"]["mean"], metrics["prompt_tokens"]["mean"]) == (3.0, 300.0)  # 5 and 1 turns of 100 tokens
    assert metrics["tool_mix"] == {"search_corpus": 1.0}
    with (out / TASKS).open(newline="") as file:
        assert [(row["task_id"], float(row["turns"])) for row in csv.DictReader(file)] == [("t1", 5.0), ("t2", 1.0)]
    resources = msgspec.json.decode((out / RESOURCES).read_bytes())
    assert (resources["rollouts"], resources["tokens"]["prefill"]) == (4, 6 * 40)
    assert b"episode" not in (out / RESOURCES).read_bytes()
    assert read_run(out).per_task["t1"]["turns"] == 5.0
    ensure_report(out)
    assert "fused from 2 rollouts" in (out / "report.html").read_text()


def test_what_only_turns_can_earn_is_told_nowhere(tmp_path: Path, data: Path) -> None:
    fusion, views = two_runs(tmp_path, data)
    metrics = write_fused(fusion, views, tmp_path / "fused")
    with (tmp_path / "fused" / TASKS).open(newline="") as file:
        columns = csv.DictReader(file).fieldnames or ()
    run = read_run(tmp_path / "fused")
    for name in ("reward", "auto_populated_kept"):
        assert name in views[0].per_task["t1"]
        assert not any(name in told for told in (metrics, columns, run.per_task["t1"]))
    assert "reward" not in compare([views[0], run]).others[0].metrics
    assert "reward" in compare(views).others[0].metrics


def test_writing_it_again_changes_nothing_and_another_fusion_is_refused(tmp_path: Path, data: Path) -> None:
    fusion, views = two_runs(tmp_path, data)
    out = tmp_path / "fused"
    write_fused(fusion, views, out)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    write_fused(fusion, views, out)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    other = fuse(views, k=5)
    assert other.stage.inputs["policy"] != fusion.stage.inputs["policy"]
    with pytest.raises(UsageError, match="another run"):
        write_fused(other, views, out)
    write_fused(other, views, out, force=True)


def test_what_cannot_be_fused_is_refused(tmp_path: Path, data: Path) -> None:
    one = read_run(run_folder(tmp_path / "one", data, [episode("t1", "a"), episode("t2", "a")]))
    with pytest.raises(UsageError, match="nothing to fuse"):
        fuse([one])
    with pytest.raises(UsageError, match="named twice"):
        fuse([one, one])
    elsewhere = read_run(run_folder(tmp_path / "two", data, [episode("t1", "a")], index="other"))
    with pytest.raises(UsageError, match="different indexes"):
        fuse([one, elsewhere])
    fewer = read_run(run_folder(tmp_path / "three", data, [episode("t1", "a")], tasks=["t1"]))
    with pytest.raises(UsageError, match="same tasks"):
        fuse([one, fewer])
    chunks = load_config(overrides=["index.unit=chunk"])
    with pytest.raises(UsageError, match="different units"):
        fuse([one, replace(one, config=chunks, folder=tmp_path)])
    with pytest.raises(UsageError, match="cap of 1 to 30"):
        fuse([one], cap=31)


def test_a_fused_run_is_not_fused_again(tmp_path: Path, data: Path) -> None:
    fusion, views = two_runs(tmp_path, data)
    write_fused(fusion, views, tmp_path / "fused")
    with pytest.raises(UsageError, match="itself fused"):
        fuse([views[0], read_run(tmp_path / "fused")])
    assert fusion.episodes[0].reward is not None
    assert fusion.episodes[0].hashes.reward == CONFIG.reward_hash
