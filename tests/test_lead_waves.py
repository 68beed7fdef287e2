"""The measurement of lead waves: what it counts, and that a wave finds what the question does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lead_waves import compared, f1, measure, played, shown
from harness1 import SearchEnv
from harness1.config import load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.policy.registry import open_policy
from harness1.records import Task, UnitId
from tests.support import CORPUS, WordRetriever


def test_a_wave_of_leads_finds_what_the_question_does_not(tmp_path: Path) -> None:
    index = tmp_path / "index"
    ensure_index(open_source("world:120"), index, load_config(None))
    question, wave = measure("world:120", str(index), "test", 20, 1, ())
    assert (question["waves"], wave["waves"], wave["tasks"]) == (0, 1, 20)
    for row in (question, wave):
        assert 0.0 < row["f1_of_first_2"] <= 1.0
        assert row["f1_of_gold_among_4"] >= row["f1_of_first_2"]
    assert wave["f1_of_gold_among_4"] > question["f1_of_gold_among_4"]


def test_an_episode_that_ends_before_it_is_read_has_found_nothing(tmp_path: Path) -> None:
    index = tmp_path / "index"
    ensure_index(open_source("world:120"), index, load_config(None))
    rows = measure("world:120", str(index), "test", 2, 1, ("env.max_turns=1",))
    assert [row["f1_of_first_2"] for row in rows] == [0.0, 0.0]


def test_a_policy_beside_the_waves_is_played_on_the_same_tasks(tmp_path: Path) -> None:
    index = tmp_path / "index"
    ensure_index(open_source("world:120"), index, load_config(None))
    _, wave, single = measure("world:120", str(index), "test", 10, 1, (), ["single-shot"])
    assert (single["policy"], single["tasks"]) == ("single-shot", 10)
    assert 0.0 < single["f1_of_first_2"] < wave["f1_of_first_2"]


def test_differences_are_paired_by_task() -> None:
    one, two, three = map(UnitId, "abc")
    gold, last_wave = {"t": {one}, "u": {two}}, {"t": [one], "u": [three]}
    row = compared(last_wave, {"u": [three], "t": [one]}, gold)
    assert (row["f1_of_first_1"], row["last_wave_minus_it_1"]) == (0.5, [0.0, 0.0, 0.0])
    row = compared(last_wave, {"u": [two], "t": [three]}, gold)
    assert (row["f1_of_first_1"], row["last_wave_minus_it_1"]) == (0.5, [0.0, -1.0, 1.0])


def test_a_difference_is_shown_with_its_interval() -> None:
    assert [shown(value) for value in (3, 0.25, [0.5, -0.125, 1.0])] == ["3", "0.250", "+0.500 (-0.125 to +1.000)"]


def test_a_fault_is_not_counted_as_a_bad_result() -> None:
    env = SearchEnv(load_config(None).env, WordRetriever(CORPUS, faults=100))
    with pytest.raises(SystemExit, match="a fault ended task t"):
        played(env, open_policy("single-shot"), Task("t", "Ada Lovelace"))


def test_f1_weighs_what_is_missing_and_what_is_wrong() -> None:
    one, two, three = map(UnitId, "abc")
    assert f1([], {one}) == 0.0
    assert f1([one, two], {one, two}) == 1.0
    assert f1([one, three], {one, two}) == 0.5
    assert f1([one], {one, two}) == 2 / 3
