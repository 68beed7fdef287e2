"""Policy gradients, corrected for the change of the weights since the tokens were sampled.

With r = pi / pi_rollout of a token and its advantage A, the gradient is that of sg(w(r)) A log pi, where sg stops
gradients. CISPO clips r to bounds to get w (MiniMax-M1, arXiv 2506.13585), so every token keeps a gradient;
double-sided masking drops tokens beyond the bounds (GLM-5, arXiv 2602.15763, after IcePop); interaction-level credit
drops whole calls, by the geometric mean of their ratios (IPA, arXiv 2512.24873); REINFORCE has w = 1. Bounds apply to r
itself; they are not offsets from 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from harness1.errors import UsageError
from harness1.rows.row import TrainRow

if TYPE_CHECKING:
    from torch import Tensor

    from harness1.training.micro_batch import MicroBatch

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clipped to this magnitude before they are exponentiated."""


class PolicyGradient(ABC):
    """`-token_weight w(r) A log pi`, over the sum of the token weights."""

    def normaliser(self, rows: Sequence[TrainRow]) -> float:
        return sum(row.token_weight * sum(row.loss_mask) for row in rows)

    def bounded(self, log_ratios: Tensor, batch: MicroBatch) -> Tensor:
        return log_ratios

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return -batch.token_weights * self.importance(logprobs, batch) * batch.weights * logprobs

    @abstractmethod
    def importance(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return w, [trained], without a gradient; raise UsageError if w needs log probabilities of the rollout, and
        the rows have none."""


@dataclass(frozen=True)
class Cispo(PolicyGradient):
    """w is r, clipped to the bounds."""

    ratio_min: float = 0.0
    ratio_max: float = 5.0

    def importance(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return log_ratios(logprobs, batch).exp().clamp(self.ratio_min, self.ratio_max)


@dataclass(frozen=True)
class DoubleSided(PolicyGradient):
    """w is r between the bounds, and 0 at and beyond them."""

    ratio_min: float = 0.0
    ratio_max: float = 5.0

    def importance(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        ratios = self.bounded(log_ratios(logprobs, batch), batch).exp()
        return ratios * ((ratios > self.ratio_min) & (ratios < self.ratio_max))


@dataclass(frozen=True)
class Interaction(DoubleSided):
    """All tokens of a call share one r, the geometric mean of theirs: w is r between the bounds, and 0 for the whole
    call at and beyond them. A single surprising token weighs less in a longer call, and no call is trained in part."""

    def bounded(self, log_ratios: Tensor, batch: MicroBatch) -> Tensor:
        return call_means(log_ratios, batch)


@dataclass(frozen=True)
class Reinforce(PolicyGradient):
    """w is 1, whichever policy sampled the token (Williams 1992)."""

    ratio_min: float = 0.0
    ratio_max: float = inf

    def importance(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return logprobs.new_ones(logprobs.shape)


def log_ratios(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Return log pi - log pi_rollout of trained tokens, [trained], clipped to `LOG_RATIO_LIMIT`, without a gradient;
    raise UsageError if the rows have no log probabilities of the rollout."""
    if batch.rollout_logprobs is None:
        raise UsageError("rows without rollout_logprobs cannot be weighted by the ratio of probabilities")
    return (logprobs.detach() - batch.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def call_means(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return for each trained token the mean of the values, [trained], over its call: the trained tokens that follow
    each other in its row without context between them."""
    import torch

    begins = torch.ones_like(batch.row, dtype=torch.bool)
    begins[1:] = (batch.row[1:] != batch.row[:-1]) | (batch.column[1:] != batch.column[:-1] + 1)
    call = begins.cumsum(0) - 1
    sums = values.new_zeros(int(begins.sum())).index_add(0, call, values)
    return (sums / call.bincount().to(values.dtype))[call]
