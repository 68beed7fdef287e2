"""Rates rise over the warm-up and fall to 0 behind the last step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Train
from harness1.training.trainer import rate_at

SCHEDULES = ("constant", "linear", "cosine")


def rates(steps: int, schedule: str, warmup: float = 0.0) -> list[float]:
    """The rates of all steps, and of the one that would follow."""
    train = Train(rate=2.0, schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
    return [rate_at(step, steps, train) for step in range(steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.5, 1.0, 0.5, 0.0]),
        ("cosine", [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0]),
    ],
)
def test_the_rate_falls_from_its_full_value_to_nothing(schedule: str, expected: list[float]) -> None:
    assert rates(4, schedule) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_behind_a_linear_rise_the_schedule_begins(schedule: str) -> None:
    found = rates(8, schedule, warmup=0.5)
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert found[4:] == pytest.approx(rates(4, schedule))


def test_a_warm_up_may_take_all_steps() -> None:
    assert rates(4, "linear", warmup=1.0)[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])


@given(st.integers(1, 50), st.floats(0, 1), st.sampled_from(SCHEDULES))
def test_every_step_has_a_rate_above_nothing_and_none_above_the_setting(
    steps: int, warmup: float, schedule: str
) -> None:
    found = rates(steps, schedule, warmup)
    assert all(0 < rate <= 2.0 for rate in found[:-1])
    assert max(found) == pytest.approx(2.0)
