"""Rates rise over the warm-up and fall to 0 behind the last step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Train
from harness1.training.schedule import SavePlan, rate_at

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


def saves(train: Train, minutes_of_a_step: float, steps: int = 12) -> list[int]:
    """The steps after which a state is saved."""
    now, saved = [0.0], []
    plan = SavePlan(train, lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += 60 * minutes_of_a_step
        if plan.is_due(step):
            saved.append(step)
            plan.saved()
    return saved


def test_a_state_is_saved_after_steps_and_after_minutes_since_the_last() -> None:
    assert saves(Train(save_every=5), 1) == [5, 10]
    assert saves(Train(save_every=50), 4) == [3, 6, 9, 12]
    assert saves(Train(save_every=5), 4) == [3, 5, 8, 10]
