"""Keep a policy near the one that training began with, by a penalty on the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from statistics import fmean

import msgspec

from harness1.errors import UsageError
from harness1.rows.row import TrainRow


def with_kl(
    rows: Sequence[TrainRow], reference: Sequence[Sequence[float]], weight: float
) -> tuple[list[TrainRow], float]:
    """Add `-weight (d - mean d)` to the advantages, with d = rollout - reference log probability of each trained token,
    and the mean over all trained tokens. Return the rows and the mean, which estimates the divergence of the rollouts'
    policy from the reference. A centred penalty does not move a baseline; `incorporate_kl_penalty` of the tinker
    cookbook, which Harness-1 was trained with, does the same without a discount.

    Args:
        rows: the rows of the whole batch.
        reference: for each row, the log probabilities of its trained tokens (`Trainer.logprobs`).

    Raises:
        UsageError: a row has no log probabilities of the rollout.
    """
    gaps = [_gaps(row, own) for row, own in zip(rows, reference, strict=True)]
    mean = fmean(gap for own in gaps for gap in own)
    return [_penalised(row, [weight * (gap - mean) for gap in own]) for row, own in zip(rows, gaps, strict=True)], mean


def _gaps(row: TrainRow, reference: Sequence[float]) -> list[float]:
    """Return d for the trained tokens of a row."""
    if row.rollout_logprobs is None:
        raise UsageError("rl.kl needs rows with rollout_logprobs")
    recorded = compress(row.rollout_logprobs, row.loss_mask)
    return [logprob - own for logprob, own in zip(recorded, reference, strict=True)]


def _penalised(row: TrainRow, penalties: Sequence[float]) -> TrainRow:
    advantages = list(row.advantages or [1.0] * len(row.token_ids))
    for place, penalty in zip(compress(count(), row.loss_mask), penalties, strict=True):
        advantages[place] -= penalty
    return msgspec.structs.replace(row, advantages=tuple(advantages))
