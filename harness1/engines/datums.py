"""Rows as a service of the Tinker API reads them: shifted by one token, with everything that weighs a token folded in.

The service sums the loss of each token over all rows. With `n` the normaliser of an optimizer step, `u` a row's token
weight and `A` an advantage, a token that is trained has the weight `u A / n` (CISPO, REINFORCE) or `A / n` (negative
log likelihood), and every other token has 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import Literal, NamedTuple

from harness1.rows.row import TrainRow
from harness1.training.algorithm import Algorithm, NegativeLogLikelihood
from harness1.training.cispo import LOG_RATIO_LIMIT, Cispo, PolicyGradient

Reduction = Literal["sum", "row_mean"]


class Loss(NamedTuple):
    """A loss of the service, by name, with its settings."""

    name: str
    settings: dict[str, float] | None = None


class Fields(NamedTuple):
    """A row for the service: `inputs` predict `fields`, which have one number per target."""

    inputs: list[int]
    fields: dict[str, list[int] | list[float]]


def loss_of(algorithm: Algorithm, reduction: Reduction) -> Loss:
    """Return the service's name of an algorithm.

    CISPO's bounds are those of the ratio itself. Bounds of 1 and 1 make every ratio 1, which turns CISPO into REINFORCE
    and into the negative log likelihood: servers that take a mean over the weights of a row have no other loss whose
    tokens can be weighted freely.
    """
    if isinstance(algorithm, Cispo):
        return _cispo(algorithm.ratio_min, algorithm.ratio_max)
    return Loss("cross_entropy") if reduction == "sum" else _cispo(1.0, 1.0)


def row_fields(rows: Sequence[TrainRow], algorithm: Algorithm, reduction: Reduction) -> list[Fields]:
    """Return the rows of an optimizer step, which must be sent as one.

    Args:
        reduction: `row_mean` undoes that a server divides a row's loss by its targets, and the sum over rows by their
            number.
    """
    name, normaliser = loss_of(algorithm, reduction).name, algorithm.normaliser(rows) or 1.0
    made = []
    for row in rows:
        scale = 1.0 if reduction == "sum" else (len(row.token_ids) - 1) * len(rows)
        weights = [weight * scale for weight in token_weights(row, algorithm, normaliser)]
        fields: dict[str, list[int] | list[float]] = {"target_tokens": list(row.token_ids[1:])}
        if name == "cispo":
            # Without recorded log probabilities the bounds are 1 and 1, and any value serves.
            recorded = row.rollout_logprobs or (0.0,) * len(row.token_ids)
            fields |= {"logprobs": list(recorded[1:]), "advantages": weights}
        else:
            fields["weights"] = weights
        made.append(Fields(list(row.token_ids[:-1]), fields))
    return made


def plain_fields(rows: Sequence[TrainRow]) -> list[Fields]:
    """Return rows for a forward pass alone: their trained tokens count 1."""
    return [
        Fields(
            list(row.token_ids[:-1]),
            {"target_tokens": list(row.token_ids[1:]), "weights": [float(mask) for mask in row.loss_mask[1:]]},
        )
        for row in rows
    ]


def token_weights(row: TrainRow, algorithm: Algorithm, normaliser: float) -> list[float]:
    """Return the weight of each target of a row in the sum."""
    token = row.token_weight if isinstance(algorithm, PolicyGradient) else 1.0
    values = row.advantages or (1.0,) * len(row.token_ids)
    return [token * value * mask / normaliser for value, mask in zip(values[1:], row.loss_mask[1:], strict=True)]


def step_loss(rows: Sequence[TrainRow], logprobs: Sequence[Sequence[float]], algorithm: Algorithm) -> float:
    """Return the loss of rows from the log probabilities of their trained tokens, as `Trainer.step` computes it."""
    normaliser, total = algorithm.normaliser(rows) or 1.0, 0.0
    for row, known in zip(rows, logprobs, strict=True):
        weights = compress(token_weights(row, algorithm, normaliser), row.loss_mask[1:])
        ratios = [1.0] * len(known)
        if isinstance(algorithm, Cispo):
            exact = (math.exp(log) for log in _log_ratios(row, known))
            ratios = [min(max(ratio, algorithm.ratio_min), algorithm.ratio_max) for ratio in exact]
        total -= sum(weight * ratio * logprob for weight, ratio, logprob in zip(weights, ratios, known, strict=True))
    return total


def distance(rows: Sequence[TrainRow], logprobs: Sequence[Sequence[float]], algorithm: Algorithm) -> dict[str, float]:
    """Return the metrics of `OffPolicyMetrics` that need no whole distributions; none if a row has no recorded log
    probabilities, or the algorithm does not use them."""
    if isinstance(algorithm, NegativeLogLikelihood) or any(row.rollout_logprobs is None for row in rows):
        return {}
    logs = [log for row, known in zip(rows, logprobs, strict=True) for log in _log_ratios(row, known)]
    ratios, count = [math.exp(log) for log in logs], max(1, len(logs))
    return {
        "k3": math.fsum(math.expm1(log) - log for log in logs) / count,
        "log_ratio_mean": math.fsum(map(abs, logs)) / count,
        "ratio_above_2": sum(ratio > 2 for ratio in ratios) / count,
        "ratio_below_half": sum(ratio < 0.5 for ratio in ratios) / count,
        "clipped": sum(not algorithm.ratio_min <= ratio <= algorithm.ratio_max for ratio in ratios) / count,
        "log_ratio_max": max(map(abs, logs), default=0.0),
    }


def _cispo(least: float, most: float) -> Loss:
    return Loss("cispo", {"clip_low_threshold": least, "clip_high_threshold": most})


def _log_ratios(row: TrainRow, logprobs: Sequence[float]) -> list[float]:
    """Return log pi - log pi_rollout of the trained tokens of a row, clipped to `LOG_RATIO_LIMIT`."""
    recorded = [known for known, mask in zip(row.rollout_logprobs or (), row.loss_mask, strict=True) if mask]
    logs = (now - then for now, then in zip(logprobs, recorded, strict=True))
    return [min(max(log, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT) for log in logs]
