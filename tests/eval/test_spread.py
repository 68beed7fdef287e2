from __future__ import annotations

import math

import numpy as np
import pytest

from harness1.errors import UsageError
from harness1.eval.statistics import VarianceComponents, variance_components


def test_the_spread_by_hand() -> None:
    # Sample variances 0.02, 0 and 0.08; means 0.5, 0.1 and 0.9, whose variance is 0.16.
    found = variance_components({"a": [0.4, 0.6], "b": [0.1, 0.1], "c": [0.7, 1.1]})
    within = 0.1 / 3
    assert found.within == pytest.approx(math.sqrt(within))
    assert found.between == pytest.approx(math.sqrt(0.16 - within / 2))
    assert found.repeats == 2


def test_tasks_that_differ_by_less_than_their_repeats_explain_do_not_differ() -> None:
    assert variance_components({"a": [0.0, 1.0], "b": [1.0, 0.0]}).between == 0.0


def test_repeats_that_agree_leave_all_of_the_spread_to_the_tasks() -> None:
    assert variance_components({"a": [0.2] * 3, "b": [0.6] * 3}) == VarianceComponents(
        pytest.approx(math.sqrt(0.08)), 0.0, 3
    )


def test_the_two_spreads_are_found_again_in_what_was_drawn_with_them() -> None:
    rng = np.random.default_rng(0)
    tasks = rng.normal(0.5, 0.3, 2000)
    found = variance_components({f"t{task}": list(rng.normal(mean, 0.1, 4)) for task, mean in enumerate(tasks)})
    assert found.between == pytest.approx(0.3, rel=0.05)
    assert found.within == pytest.approx(0.1, rel=0.05)


def test_tasks_with_fewer_samples_are_allowed_for() -> None:
    rng = np.random.default_rng(1)
    tasks = rng.normal(0.5, 0.1, 4000)
    found = variance_components(
        {f"t{task}": list(rng.normal(mean, 0.3, 1 + task % 3)) for task, mean in enumerate(tasks)}
    )
    assert found.between == pytest.approx(0.1, rel=0.15)
    assert found.within == pytest.approx(0.3, rel=0.05)
    assert found.repeats == 3


def test_without_repeats_nothing_can_be_told_and_of_one_task_not_all() -> None:
    with pytest.raises(UsageError, match="two samples"):
        variance_components({"a": [1.0], "b": [0.0]})
    with pytest.raises(UsageError, match="no task without samples"):
        variance_components({"a": [1.0, 2.0], "b": []})
    alone = variance_components({"a": [0.0, 1.0]})
    assert math.isnan(alone.between)
    assert alone.within == pytest.approx(math.sqrt(0.5))
