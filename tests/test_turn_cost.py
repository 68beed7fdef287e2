"""How many turns a way of training needs until a reward: `benchmarks/pivots.py`."""

from __future__ import annotations

import pytest

from benchmarks.pivots import cost, interval, rising


def test_a_curve_is_made_monotone_by_pooling_what_falls() -> None:
    curve = [(0.0, 5.0), (10.0, 2.0), (20.0, 4.0), (30.0, 3.0), (40.0, 6.0)]
    assert rising(curve, 1.0) == [(0.0, 1.0), (10.0, 2.0), (20.0, 3.5), (30.0, 3.5), (40.0, 6.0)]


def test_turns_are_counted_until_three_quarters_of_what_both_ways_reach() -> None:
    whole = [[(0.0, 0.0), (100.0, 1.0), (200.0, 2.0)], [(0.0, 2.0), (100.0, 3.0), (200.0, 4.0)]]
    single = [[(0.0, 1.0), (10.0, 2.0), (20.0, 5.0)], [(0.0, 1.0), (10.0, 2.0), (20.0, 5.0)]]
    found = cost(whole, single)  # both begin at 1; the means end at 3 and at 5
    assert found["level"] == pytest.approx(2.5)
    assert found["turns_of_episodes"] == pytest.approx(150.0)
    assert found["single_turns"] == pytest.approx(10 + 10 / 6)
    assert found["ratio"] == pytest.approx((10 + 10 / 6) / 150)


def test_the_interval_holds_the_ratio_and_has_a_width_where_seeds_differ() -> None:
    whole = [[(0.0, 0.0), (100.0, 1.0), (200.0, 2.0)], [(0.0, 0.0), (100.0, 2.0), (200.0, 2.0)]]
    single = [[(0.0, 0.0), (10.0, 1.0), (20.0, 2.0)]] * 2
    found = interval(whole, single)
    assert found["low"] < found["mean"] < found["high"]
    assert found == interval(whole, single)
