"""Before the first step: sampler and trainer may differ as their precisions explain, and by no more."""

from __future__ import annotations

import math

import pytest

from harness1.config import load_config
from harness1.errors import UsageError
from harness1.rl import logprobs
from harness1.rl.logprobs import check_start

RECORDED = [-0.5, -1.0, -2.0, -0.25]


def gated(difference: float, sampler: str, trainer: str) -> dict[str, float]:
    """The gate for log probabilities that all differ by as much."""
    config = load_config(None, [f"policy.dtype={sampler}", f"train.dtype={trainer}"])
    return check_start([known + difference for known in RECORDED], RECORDED, config)


def test_in_float32_every_token_must_agree() -> None:
    assert gated(0.9e-4, "float32", "float32")["gate/max_difference"] == pytest.approx(0.9e-4)
    with pytest.raises(UsageError, match=r"a difference of 0\.0001 is allowed for policy\.dtype=float32"):
        gated(1.1e-4, "float32", "float32")


@pytest.mark.parametrize(
    ("sampler", "trainer"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_of_rounded_log_probabilities_the_mean_k3_must_be_within_the_bound_of_the_pair(
    sampler: str, trainer: str
) -> None:
    """A difference of d has a k3 of about d^2 / 2."""
    near = math.sqrt(2 * 4e-3)
    logged = gated(near, sampler, trainer)
    assert logged["gate/mean_k3"] == pytest.approx(math.exp(near) - 1 - near)
    with pytest.raises(UsageError, match=r"mean k3 of 0\.005 is allowed.*effective sample is 100\.0% of the tokens"):
        gated(math.sqrt(2 * 6e-3), sampler, trainer)
    with pytest.raises(UsageError, match="the rollouts are not from the model in training"):
        gated(1.0, sampler, trainer)


def test_a_batch_without_tokens_or_with_what_is_no_number_is_refused() -> None:
    config = load_config()
    for values in ([], [math.nan]):
        with pytest.raises(UsageError):
            check_start(values, values, config)


def test_truncated_weights_are_those_computed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of 1, 8 and 0.5 between 0.6 and 4: weights 1, 4 and 0.5, (5.5)^2 / (3 * 17.25)."""
    monkeypatch.setattr(logprobs, "EXACT_BOUND", 9.0)
    loose = ["policy.dtype=float32", "train.dtype=float32", "rl.ratio_min=0.6", "rl.ratio_max=4"]
    found = check_start([0.0, math.log(8), math.log(0.5)], [0.0] * 3, load_config(None, loose))
    assert found["gate/beyond_bounds"] == pytest.approx(2 / 3)
    assert found["gate/effective_share"] == pytest.approx(5.5**2 / (3 * 17.25))
    assert found["gate/largest_ratio"] == pytest.approx(8.0)
