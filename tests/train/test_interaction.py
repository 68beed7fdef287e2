"""Interaction-level credit: the tokens of a call share one ratio, and are trained or dropped together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness1.rows import TrainRow
from harness1.training.algorithm import Cispo, DoubleSided, Interaction, MicroBatch, OffPolicyMetrics, call_means
from harness1.training.process_group import ALONE
from harness1.training.trainer import collate

LOGPROB = -1.5
"""Of every token, now."""
Calls = Sequence[Sequence[float]]
"""The ratios of the tokens of each call of a row."""

ratios = st.floats(0.02, 40.0)
rows = st.lists(st.lists(st.lists(ratios, min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=4)
bounds = st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 10.0))


def row_of(calls: Calls, context: int = 1) -> TrainRow:
    """A row with context before each of its calls."""
    mask, recorded = [0], [0.0]
    for call in calls:
        mask += [0] * context + [1] * len(call)
        recorded += [0.0] * context + [LOGPROB - math.log(ratio) for ratio in call]
    return TrainRow(tuple(range(len(mask))), tuple(mask), tuple(recorded), (1.0,) * len(mask))


def batch_of(rows: Sequence[Calls]) -> MicroBatch:
    return collate([row_of(calls) for calls in rows])


def weights(algorithm: DoubleSided | Cispo, batch: MicroBatch) -> list[float]:
    found: list[float] = algorithm.importance(torch.full(batch.targets.shape, LOGPROB), batch).tolist()
    return found


def test_three_calls_by_hand() -> None:
    # sqrt(4 * 1/4) = 1, sqrt(2 * 8) = 4 is beyond 3, and a call of one token has its own ratio
    batch = batch_of([[(4.0, 0.25), (2.0, 8.0)], [(0.5,)]])
    assert weights(Interaction(0.25, 3.0), batch) == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.5], rel=1e-5)
    losses = Interaction(0.25, 3.0).token_losses(torch.full((5,), LOGPROB), batch)
    assert losses.tolist() == pytest.approx([1.5, 1.5, 0.0, 0.0, 0.75], rel=1e-5)


@given(rows, bounds)
def test_a_call_has_the_geometric_mean_of_its_ratios_or_is_dropped(
    rows: list[list[list[float]]], bounds: tuple[float, float]
) -> None:
    expected = []
    for call in (call for calls in rows for call in calls):
        mean = math.exp(math.fsum(map(math.log, call)) / len(call))
        if any(abs(mean - bound) < 1e-3 for bound in bounds):
            return
        expected += [mean if bounds[0] < mean < bounds[1] else 0.0] * len(call)
    assert weights(Interaction(*bounds), batch_of(rows)) == pytest.approx(expected, rel=1e-4)


@given(st.lists(ratios, min_size=1, max_size=12), bounds)
def test_calls_of_one_token_are_masked_as_tokens_and_within_the_bounds_weigh_as_in_cispo(
    each: list[float], bounds: tuple[float, float]
) -> None:
    batch = batch_of([[(ratio,) for ratio in each]])
    found = weights(Interaction(*bounds), batch)
    assert found == weights(DoubleSided(*bounds), batch)
    clipped = weights(Cispo(*bounds), batch)
    assert all(weight in (0.0, same) for weight, same in zip(found, clipped, strict=True))
    assert weights(Interaction(0.0, 100.0), batch) == weights(Cispo(0.0, 100.0), batch)


@given(st.floats(-2.0, 2.0), st.integers(1, 200))
def test_a_constant_difference_has_the_same_ratio_whatever_the_length(difference: float, length: int) -> None:
    batch = batch_of([[[math.exp(difference)] * length]])
    assert weights(Interaction(0.0, 100.0), batch) == pytest.approx([math.exp(difference)] * length, rel=1e-4)


def test_calls_that_touch_across_rows_stay_apart() -> None:
    """The last token of a row and the first of the next may have neighbouring columns."""
    first = TrainRow((1, 2), (0, 1), (0.0, -1.0))
    second = TrainRow((1, 2, 3), (0, 0, 1), (0.0, 0.0, -1.0))
    assert call_means(torch.tensor([1.0, 3.0]), collate([first, second])).tolist() == [1.0, 3.0]


def test_a_token_counts_as_clipped_with_its_call() -> None:
    batch = batch_of([[(4.0, 0.25), (2.0, 8.0)], [(0.5,)]])
    logprobs = torch.full((5,), LOGPROB)
    shares = {}
    for algorithm in (Interaction(0.3, 3.0), DoubleSided(0.3, 3.0)):
        seen = OffPolicyMetrics(algorithm, torch.device("cpu"))
        seen.add(torch.zeros(5, 1), logprobs, batch)
        shares[type(algorithm)] = seen.values(ALONE)["clipped"]
    assert shares == {Interaction: pytest.approx(2 / 5), DoubleSided: pytest.approx(3 / 5)}
