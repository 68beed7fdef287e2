from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.errors import UsageError
from harness1.eval import statistics
from harness1.eval.statistics import bootstrap_mean, bootstrap_means, paired_difference, task_means

VALUES = st.lists(st.floats(-5, 5), min_size=1, max_size=30)


def test_the_interval_of_uniform_numbers_is_that_of_theory() -> None:
    values = (np.arange(400) + 0.5) / 400
    interval = bootstrap_mean(values, 2000)
    half = 1.96 * math.sqrt(1 / 12 / 400)
    assert interval.mean == pytest.approx(0.5)
    assert interval.low == pytest.approx(0.5 - half, rel=0.01)
    assert interval.high == pytest.approx(0.5 + half, rel=0.01)


def test_the_interval_covers_the_true_mean_as_often_as_it_promises() -> None:
    rng = np.random.default_rng(7)
    sets = rng.beta(0.5, 0.7, size=(300, 60))  # as skewed as recalls are
    intervals = [bootstrap_mean(values, 400, seed) for seed, values in enumerate(sets)]
    covered = sum(interval.low <= 0.5 / 1.2 <= interval.high for interval in intervals)
    assert 270 <= covered <= 297


@given(VALUES, st.integers(0, 5))
def test_an_interval_is_ordered_inside_the_data_and_repeatable(values: list[float], seed: int) -> None:
    interval = bootstrap_mean(values, 50, seed)
    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9
    assert interval.mean == pytest.approx(np.mean(values))
    assert interval == bootstrap_mean(values, 50, seed)


def test_another_seed_draws_other_resamples() -> None:
    values = np.random.default_rng(0).random(50)
    assert bootstrap_mean(values, 100, 0) != bootstrap_mean(values, 100, 1)


def test_degenerate_cases_are_defined() -> None:
    assert all(math.isnan(bound) for bound in vars_of(bootstrap_mean([], 10)))
    assert vars_of(bootstrap_mean([0.7], 10)) == (0.7, 0.7, 0.7)
    constant = bootstrap_mean([0.1] * 30, 10)
    assert constant.low == constant.mean == constant.high
    with pytest.raises(UsageError, match="resample"):
        bootstrap_mean([1.0], 0)


def vars_of(interval: statistics.Interval) -> tuple[float, float, float]:
    return interval.mean, interval.low, interval.high


def test_columns_share_their_resamples() -> None:
    values = np.random.default_rng(0).random(40)
    one, twice = bootstrap_means(np.stack([values, 2 * values], axis=1), 200)
    assert vars_of(one) == pytest.approx(vars_of(bootstrap_mean(values, 200)))
    assert vars_of(twice) == pytest.approx([2 * bound for bound in vars_of(one)])


def test_many_tasks_are_drawn_in_blocks_and_every_resample_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    whole = statistics._block_of_means

    def counted(values: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
        sizes.append((size, len(values)))
        return whole(values, size, rng)

    monkeypatch.setattr(statistics, "_block_of_means", counted)
    bootstrap_mean(np.zeros(20_000), 130)
    assert sum(size for size, _ in sizes) == 130
    assert max(size * tasks for size, tasks in sizes) <= 1 << 20


def test_pairing_cancels_the_spread_between_tasks() -> None:
    spread = np.random.default_rng(1).random(50)
    a = {f"t{task}": value + 0.1 for task, value in enumerate(spread)}
    b = {f"t{task}": value for task, value in enumerate(spread)}
    assert vars_of(paired_difference(a, b, 100)) == pytest.approx((0.1, 0.1, 0.1))
    assert vars_of(paired_difference(b, a, 100)) == pytest.approx((-0.1, -0.1, -0.1))


def test_pairing_ignores_the_order_of_tasks() -> None:
    a = {f"t{task}": value for task, value in enumerate(np.random.default_rng(1).random(20))}
    b = dict.fromkeys(a, 0.5)
    assert paired_difference(a, b, 100) == paired_difference(dict(reversed(a.items())), b, 100)


def test_runs_of_different_tasks_are_not_paired() -> None:
    a, b = dict.fromkeys([f"t{n}" for n in range(9)], 1.0), {"t0": 1.0, "u": 0.0}
    with pytest.raises(UsageError, match=r"9 are not: t1, t2, t3, t4, t5, \.\.\."):
        paired_difference(a, b, 10)
    with pytest.raises(UsageError, match=r"1 are not: u$"):
        paired_difference({"t0": 1.0}, b, 10)


def test_samples_of_a_task_are_averaged_first() -> None:
    assert task_means([("a", 1.0), ("b", 0.0), ("a", 0.0), ("a", 0.5)]) == {"a": 0.5, "b": 0.0}
