"""The gate before the first step: do sampler and trainer compute the same log probabilities of the same tokens?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness1.config import Config
from harness1.errors import UsageError
from harness1.records import Record
from harness1.rl.logprobs import report_of

EXACT = "float32"


class TruncatedWeights(Record):
    """The importance weights r = pi / pi_rollout of sampled tokens, as a truncated estimator uses them: min(r, highest)
    (Ionides, "Truncated importance sampling", 2008)."""

    beyond: float
    """Share of the tokens whose r is outside the bounds."""
    effective: float
    """Effective sample size (Kish) of the truncated weights, (sum w)^2 / sum w^2, as a share of the tokens."""
    largest: float
    """The largest r, before truncation."""


def truncated_weights(differences: Sequence[float], lowest: float, highest: float) -> TruncatedWeights:
    """Return the weights of tokens by their differences of log probabilities, log r.

    Args:
        lowest, highest: the bounds of r, `rl.ratio_min` and `rl.ratio_max`.
    """
    if not differences:
        return TruncatedWeights(0.0, 1.0, 1.0)
    ratios = [math.exp(min(each, 700.0)) for each in differences]  # a larger one would overflow
    kept = [min(each, highest) for each in ratios]
    squares = sum(each * each for each in kept)
    effective = sum(kept) ** 2 / (len(kept) * squares) if squares else 0.0
    return TruncatedWeights(sum(not lowest <= each <= highest for each in ratios) / len(ratios), effective, max(ratios))


def check_start(replayed: Sequence[float], recorded: Sequence[float], config: Config) -> dict[str, float]:
    """Compare log probabilities at temperature 1 of the tokens of a first batch; return the values to log.

    With both in float32, every difference must be within `rl.gate.exact`. Otherwise the tokens are known to differ, and
    the mean k3 must be within the bound of the pair.

    Args:
        replayed, recorded: of the trainer and of the sampler, token by token.

    Raises:
        UsageError: they differ by more than the precisions can explain, or there is no token.
    """
    gate, pair = config.rl.gate, (config.policy.dtype, config.train.dtype)
    report = report_of(replayed, recorded)
    pairs = zip(replayed, recorded, strict=True)
    weights = truncated_weights([new - old for new, old in pairs], config.rl.ratio_min, config.rl.ratio_max)
    exact = set(pair) == {EXACT}
    bound = gate.exact if exact else gate.same if len(set(pair)) == 1 else gate.mixed
    if not report.tokens or not (report.max_difference if exact else report.mean_k3) <= bound:
        measure = "difference" if exact else "mean k3"
        raise UsageError(
            "the rollouts are not from the model in training: log probabilities differ by up to"
            f" {report.max_difference:.2g} (mean k3 {report.mean_k3:.2g}) over {report.tokens} tokens, where a"
            f" {measure} of {bound:g} is allowed for policy.dtype={pair[0]} and train.dtype={pair[1]} (rl.gate). Of the"
            f" importance weights {weights.beyond:.2%} are outside rl.ratio_min and rl.ratio_max, the largest is"
            f" {weights.largest:.3g}, and the effective sample is {weights.effective:.1%} of the tokens"
        )
    return {
        "gate/max_difference": report.max_difference,
        "gate/mean_k3": report.mean_k3,
        "gate/beyond_bounds": weights.beyond,
        "gate/effective_share": weights.effective,
        "gate/largest_ratio": weights.largest,
    }
