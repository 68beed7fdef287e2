import math

import numpy as np
import pytest
from msgspec.structs import astuple

from harness1.errors import UsageError
from harness1.eval import statistics
from harness1.eval.statistics import (
    bootstrap_mean,
    bootstrap_means,
    holm,
    paired_difference,
    randomisation_test,
    task_means,
)


def test_the_interval_covers_the_true_mean_as_often_as_it_promises() -> None:
    rng = np.random.default_rng(7)
    sets = rng.beta(0.5, 0.7, size=(300, 60))  # as skewed as recalls are
    intervals = [bootstrap_mean(values, 400, seed) for seed, values in enumerate(sets)]
    covered = sum(interval.low <= 0.5 / 1.2 <= interval.high for interval in intervals)
    assert 270 <= covered <= 297


def test_no_task_one_task_and_equal_tasks_are_defined() -> None:
    assert all(math.isnan(bound) for bound in astuple(bootstrap_mean([], 10)))
    assert astuple(bootstrap_mean([0.7], 10)) == (0.7, 0.7, 0.7)
    constant = bootstrap_mean([0.1] * 30, 10)
    assert constant.low == constant.mean == constant.high
    with pytest.raises(UsageError, match="resample"):
        bootstrap_mean([1.0], 0)


def test_columns_share_their_resamples_which_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random(40)
    whole = astuple(bootstrap_mean(values, 130))
    monkeypatch.setattr(statistics, "_CELLS", 3 * 40)
    one, twice = bootstrap_means(np.stack([values, 2 * values], axis=1), 130)
    assert astuple(one) == pytest.approx(whole)
    assert astuple(twice) == pytest.approx([2 * bound for bound in whole])


def test_pairing_cancels_the_spread_between_tasks() -> None:
    spread = np.random.default_rng(1).random(50)
    a, b = by_task(list(spread + 0.1)), by_task(list(spread))
    assert astuple(paired_difference(a, b, 100)) == pytest.approx((0.1, 0.1, 0.1))
    assert astuple(paired_difference(b, a, 100)) == pytest.approx((-0.1, -0.1, -0.1))


def test_runs_of_different_tasks_are_not_paired() -> None:
    a, b = dict.fromkeys([f"t{n}" for n in range(9)], 1.0), {"t0": 1.0, "u": 0.0}
    with pytest.raises(UsageError, match=r"9 differ: t1, t2, t3, t4, t5, \.\.\."):
        paired_difference(a, b, 10)
    with pytest.raises(UsageError, match=r"1 differ: u$"):
        paired_difference({"t0": 1.0}, b, 10)


def by_task(values: list[float]) -> dict[str, float]:
    return {f"t{task}": value for task, value in enumerate(values)}


def test_the_exact_test_by_hand() -> None:
    # Of the 8 sums of +-1 +-2 +-3, two are as large as 6; of those of +-1 +-2 -+3, all are at least 0.
    assert randomisation_test(by_task([1, 2, 3]), by_task([0, 0, 0]), 8) == 2 / 8
    assert randomisation_test(by_task([1, 2, -3]), by_task([0, 0, 0]), 8) == 1.0
    assert randomisation_test(by_task([0, 0, 0]), by_task([1, 2, 3]), 8, seed=3) == 2 / 8
    # A task without a difference changes nothing, and 20 that agree are beyond what chance does in 2 of 2**20.
    assert randomisation_test(by_task([1, 2, 3, 7]), by_task([0, 0, 0, 7]), 8) == 2 / 8
    assert randomisation_test(by_task([0.1] * 20), by_task([0.0] * 20), 2**20) == 2 / 2**20


def test_many_pairs_are_tested_by_random_signs_near_the_exact_value() -> None:
    rng = np.random.default_rng(5)
    a, b = by_task(list(rng.random(14) + 0.12)), by_task(list(rng.random(14)))
    exact, drawn = randomisation_test(a, b, 2**14), randomisation_test(a, b, 2**14 - 1)
    assert 0.01 < exact < 0.99
    assert drawn == pytest.approx(exact, abs=0.02)
    assert drawn == randomisation_test(a, b, 2**14 - 1)
    assert drawn != exact
    assert randomisation_test(by_task([1.0] * 60), by_task([0.0] * 60), 99) == 1 / 100  # never 0
    assert randomisation_test({}, {}, 10) == 1.0
    assert randomisation_test(by_task([0.3] * 50), by_task([0.3] * 50), 10) == 1.0
    with pytest.raises(UsageError, match="resample"):
        randomisation_test({}, {}, 0)


def test_signs_are_drawn_in_blocks_and_every_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    a = by_task([1.0, 2.0, 3.0, 5.0, 7.5, 0.5])
    drawn = randomisation_test(a, dict.fromkeys(a, 0.0), 63)
    monkeypatch.setattr(statistics, "_CELLS", 30)
    assert randomisation_test(a, dict.fromkeys(a, 0.0), 64) == 2 / 64
    assert randomisation_test(a, dict.fromkeys(a, 0.0), 63) == pytest.approx(drawn, abs=0.1)


def test_holm_and_means_by_hand() -> None:
    assert task_means([("a", 1.0), ("b", 0.0), ("a", 0.0), ("a", 0.5)]) == {"a": 0.5, "b": 0.0}
    assert holm({"b": 0.04, "a": 0.01, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"b": 0.06, "a": 0.03, "c": 0.06, "d": 0.02}
    )
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert list(holm({"b": 0.5, "a": 0.1})) == ["b", "a"]
    assert holm({}) == {}
