"""The divergence from the policy that training began with is a penalty on each token."""

from __future__ import annotations

import pytest

from harness1.errors import UsageError
from harness1.rl.reference import with_kl
from harness1.rows.row import TrainRow

ROWS = [
    TrainRow((5, 6, 7, 8), (0, 1, 0, 1), (0.0, -1.0, 0.0, -2.0), (0.0, 0.5, 0.0, 0.5)),
    TrainRow((5, 6), (0, 1), (0.0, -3.0), (9.0, -1.0)),
]
REFERENCE = [[-1.5, -2.0], [-2.0]]
"""Differences of 0.5, 0 and -1, with the mean -1/6."""


def test_a_penalty_by_hand() -> None:
    rows, divergence = with_kl(ROWS, REFERENCE, 0.3)
    assert divergence == pytest.approx(-1 / 6)
    assert rows[0].advantages == pytest.approx((0.0, 0.5 - 0.3 * (0.5 + 1 / 6), 0.0, 0.5 - 0.3 / 6))
    assert rows[1].advantages == pytest.approx((9.0, -1.0 + 0.3 * (1 - 1 / 6)))


def test_penalties_move_no_baseline() -> None:
    rows, _ = with_kl(ROWS, REFERENCE, 5.0)
    moved = [
        after - before
        for row, old in zip(rows, ROWS, strict=True)
        for after, before in zip(row.advantages or (), old.advantages or (), strict=True)
    ]
    assert sum(moved) == pytest.approx(0.0)
    assert any(moved)


def test_at_the_reference_nothing_is_penalised() -> None:
    same = [[-1.0, -2.0], [-3.0]]
    assert with_kl(ROWS, same, 5.0) == (ROWS, 0.0)


def test_rows_without_recorded_log_probabilities_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rl\.kl"):
        with_kl([TrainRow((1, 2), (0, 1))], [[-1.0]], 0.1)
