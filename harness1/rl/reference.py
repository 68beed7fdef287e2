"""Keep a policy near the one that training began with, by a penalty on the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from harness1.config import Train
from harness1.errors import UsageError
from harness1.rows.row import TrainRow
from harness1.train.micro_batch import by_token_budget, collate, precision, trained_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def row_logprobs(model: PreTrainedModel, rows: Sequence[TrainRow], train: Train) -> list[list[float]]:
    """Return the natural log probabilities of the trained tokens of each row, in order; the model is not changed.

    Args:
        model: from `load_trainable`.
        train: sets the tokens of a forward pass and its data type.
    """
    import torch

    found: list[list[float]] = [[] for _ in rows]
    for places in by_token_budget([len(row.token_ids) for row in rows], train.micro_tokens):
        batch = collate([rows[place] for place in places], model.device)
        with torch.no_grad(), precision(model, train.dtype):
            logprobs = trained_logprobs(model, batch)
        for row, logprob in zip(batch.row.tolist(), logprobs.tolist(), strict=True):
            found[places[row]].append(logprob)
    return found


def with_kl(
    rows: Sequence[TrainRow], reference: Sequence[Sequence[float]], weight: float
) -> tuple[list[TrainRow], float]:
    """Add `-weight (d - mean d)` to the advantages, with d = rollout - reference log probability of each trained token,
    and the mean over all trained tokens. Return the rows and the mean, which estimates the divergence of the rollouts'
    policy from the reference. A centred penalty does not move a baseline; `incorporate_kl_penalty` of the tinker
    cookbook, which Harness-1 was trained with, does the same without a discount.

    Args:
        rows: the rows of the whole batch.
        reference: for each row, the log probabilities of its trained tokens (`row_logprobs`).

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
