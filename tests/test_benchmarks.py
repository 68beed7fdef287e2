"""The benchmarks run, and report what they promise; no time is asserted."""

import json
from pathlib import Path

import pytest

from benchmarks import env_turn, prefix_reuse, retrieval
from harness1.errors import UsageError


def test_env_turn_compares_both_modes(capsys: pytest.CaptureFixture[str]) -> None:
    report = env_turn.main(["--episodes", "1", "--turns", "2", "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert report["modes"].keys() == {"search", "mix"}
    for rows in report["modes"].values():
        assert [row["turn"] for row in rows] == [1, 2]
        keys = {"turn", "action", "ours_ms", "peer_ms", "ratio", "ours_tokens", "peer_tokens"}
        assert all(row.keys() == keys for row in rows)
    assert [row["action"] for row in report["modes"]["mix"]] == ["search_corpus", "curate"]


def test_env_turn_measures_real_passages_with_evidence_and_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    report = env_turn.main(["--text", "world:60", "--episodes", "2", "--turns", "2", "--evidence", "--ids", "--json"])
    assert json.loads(capsys.readouterr().out) == report
    for row in (row for rows in report["modes"].values() for row in rows):
        for way in ("ids", "evidence", "evidence_ids"):
            assert row[f"{way}_ms"] > 0
            assert row[f"{way}_ratio"] == pytest.approx(row[f"{way}_ms"] / row["ours_ms"], abs=0.02)
    with pytest.raises(UsageError, match="need 800"):
        env_turn.main(["--text", "world:60", "--episodes", "2"])


def test_prefix_reuse_compares_the_orders(capsys: pytest.CaptureFixture[str]) -> None:
    report = prefix_reuse.main(["--episodes", "1", "--turns", "6", "--world", "80", "--json"])
    assert json.loads(capsys.readouterr().out)["limits"].keys() == {"30720", "8192"}
    orders = report["limits"][30_720]
    assert orders.keys() == {"paper", "stable_first", "epoch"}
    assert all(row.keys() == orders["paper"].keys() for row in orders.values())
    assert orders["paper"]["ratio_to_paper"] == 1
    assert orders["paper"]["rows"] == 6
    assert orders["epoch"]["rows"] == orders["epoch"]["epochs"] == 2
    assert orders["epoch"]["prefilled_tokens"] < orders["stable_first"]["prefilled_tokens"]


def test_retrieval_measures_bm25_beside_peers_and_grep_beside_scans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = ["--chunks", "400", "--folder", str(tmp_path), "--engines", "ours", "rank_bm25"]
    report = retrieval.main(["bm25", "grep", *seen, "--json"])
    assert json.loads(capsys.readouterr().out) == report
    ours, peer = report["bm25"]
    assert ours["ms_ratio"] == ours["excluding_ms_ratio"] == 1
    assert peer["excluding_ms"] / ours["excluding_ms"] == pytest.approx(peer["excluding_ms_ratio"])
    assert peer["agreement"] > 0.8
    assert all(row["hits"] >= 1 for row in report["grep"])
    assert {row["pattern"].startswith("(?i)") for row in report["grep"]} == {True, False}
    assert all(row["outcome"] for row in report["hostile"])


@pytest.mark.slow
def test_the_messy_folder_is_asked_of_every_system_over_the_same_texts(tmp_path: Path) -> None:
    report = retrieval.folder_tables(tmp_path, around=20, draw=0)
    assert [row["system"] for row in report["folder"]] == ["script", "one search", "bm25s", "words counted"]
    script = report["folder"][0]
    assert script["questions"] == 57
    assert script["first_3"] == pytest.approx(1 - len(report["missed"]) / 57)
    assert script["first_3_behind"] == 0
