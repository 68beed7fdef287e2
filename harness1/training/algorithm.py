"""Policy gradients, corrected for the change of the weights since the tokens were sampled. With r = pi / pi_rollout of
a token and its advantage A, the gradient is that of sg(w(r)) A log pi, where sg stops gradients. CISPO clips r to
bounds to get w (MiniMax-M1, arXiv 2506.13585), so every token keeps a gradient; double-sided masking drops tokens
beyond the bounds (GLM-5, arXiv 2602.15763, after IcePop); interaction-level credit drops whole calls, by the geometric
mean of their ratios (IPA, arXiv 2512.24873); REINFORCE has w = 1. Bounds apply to r itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from math import inf
from typing import TYPE_CHECKING

from harness1.config import Rl
from harness1.errors import UsageError
from harness1.rows import TrainRow
from harness1.training.process_group import ProcessGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor


LOG_RATIO_LIMIT = 20.0  # log ratios are clipped to this magnitude before they are exponentiated


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: rows padded on the right, [rows, longest], and their trained tokens, [trained]."""

    ids: Tensor
    row: Tensor  # the row of each trained token
    column: Tensor  # the column whose logits predict the token: the one before its own
    targets: Tensor  # its id
    weights: Tensor  # float32: its advantage, or 1
    token_weights: Tensor  # float32: its weight in the mean over tokens
    rollout_logprobs: Tensor | None  # float32, as recorded; None if a row has none


@dataclass(frozen=True)
class Algorithm(ABC):
    """A loss over trained tokens. That of an optimizer step is the sum of `token_losses` over its tokens, divided by
    the `normaliser` of its rows. This is known first, so micro-batches and processes do not change the loss. Tokens
    whose ratio of probabilities (present to sampled; `bound` gives its logarithm) is out of bounds are clipped."""

    ratio_min: float = 0.0
    ratio_max: float = inf

    def bound(self, log_ratios: Tensor, batch: MicroBatch) -> Tensor:
        """Return the logarithm of the ratio that the bounds apply to, [trained], from those of the tokens."""
        return log_ratios

    @abstractmethod
    def normaliser(self, rows: Sequence[TrainRow]) -> float:
        """Return the divisor of the summed loss; it is additive over rows."""

    @abstractmethod
    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the loss of each trained token, [trained], from its log probability under the present weights."""


@dataclass(frozen=True)
class NegativeLogLikelihood(Algorithm):
    """`-w log p` over the sum of the weights w, as in fine-tuning: a row's advantages, or 1."""

    def normaliser(self, rows: Sequence[TrainRow]) -> float:
        return sum(
            sum(row.loss_mask) if row.advantages is None else sum(compress(row.advantages, row.loss_mask))
            for row in rows
        )

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return -batch.weights * logprobs


@dataclass(frozen=True)
class Reinforce(Algorithm):
    """`-token_weight w(r) A log pi`, over the sum of the token weights, with w = 1 (Williams 1992)."""

    def normaliser(self, rows: Sequence[TrainRow]) -> float:
        return sum(row.token_weight * sum(row.loss_mask) for row in rows)

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return -batch.token_weights * self.importance(logprobs, batch) * batch.weights * logprobs

    def importance(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return w, [trained], without a gradient; raise as `log_ratios`."""
        return logprobs.new_ones(logprobs.shape)


@dataclass(frozen=True)
class Cispo(Reinforce):
    """w is r, clipped to the bounds."""

    ratio_max: float = 5.0

    def importance(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return log_ratios(logprobs, batch).exp().clamp(self.ratio_min, self.ratio_max)


@dataclass(frozen=True)
class DoubleSided(Reinforce):
    """w is r between the bounds, and 0 at and beyond them."""

    ratio_max: float = 5.0

    def importance(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        ratios = self.bound(log_ratios(logprobs, batch), batch).exp()
        return ratios * ((ratios > self.ratio_min) & (ratios < self.ratio_max))


@dataclass(frozen=True)
class Interaction(DoubleSided):
    """All tokens of a call share one r, the geometric mean of theirs: w is r between the bounds, and 0 for the whole
    call at and beyond them. A single surprising token weighs less in a longer call, and no call is trained in part."""

    def bound(self, log_ratios: Tensor, batch: MicroBatch) -> Tensor:
        """As `Algorithm.bound`; a call is the trained tokens that follow each other in their row without context."""
        import torch

        begins = torch.ones_like(batch.row, dtype=torch.bool)
        begins[1:] = (batch.row[1:] != batch.row[:-1]) | (batch.column[1:] != batch.column[:-1] + 1)
        call = begins.cumsum(0) - 1
        sums = log_ratios.new_zeros(int(begins.sum())).index_add(0, call, log_ratios)
        return (sums / call.bincount().to(log_ratios.dtype))[call]


def log_ratios(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Return log pi - log pi_rollout of trained tokens, [trained], clipped to `LOG_RATIO_LIMIT`, without a gradient;
    raise UsageError if the rows have no log probabilities of the rollout."""
    if batch.rollout_logprobs is None:
        raise UsageError("rows without rollout_logprobs cannot be weighted by the ratio of probabilities")
    return (logprobs.detach() - batch.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


BOUNDED = {"cispo": Cispo, "double_sided": DoubleSided, "interaction": Interaction}  # with bounds from the settings
LOSSES: dict[str, type[Algorithm]] = {"nll": NegativeLogLikelihood, **BOUNDED, "reinforce": Reinforce}
"""All losses by name. Those of reinforcement learning are also listed in `Rl.algorithm`."""


def make_algorithm(name: str, rl: Rl | None = None) -> Algorithm:
    """Return the loss with a name; `rl` holds the bounds of the ratio. Raise UsageError if the name is unknown."""
    if name not in LOSSES:
        raise UsageError(f"there is no loss {name!r}; choose one of {', '.join(LOSSES)}")
    return LOSSES[name](*(rl or Rl()).ratio) if name in BOUNDED else LOSSES[name]()


MEANS = ("entropy", "k3", "log_ratio_mean", "ratio_above_2", "ratio_below_half", "clipped")
"""Means over trained tokens, with r = pi / pi_rollout: the entropy of pi in nats; r - 1 - log r, which estimates
KL(pi_rollout || pi) (Schulman, "Approximating KL divergence", 2020); |log r|; and the shares of tokens with r > 2, with
r < 1/2, and with a ratio beyond the bounds of the algorithm: their own, or that of their call."""
MAXIMUM = "log_ratio_max"  # the greatest |log r|, after clipping
PIECE = 256  # tokens whose entropy is computed at once, to save memory


class OffPolicyMetrics:
    """Sums over the forward passes of a step, in all processes. The algorithm's bounds define clipped tokens."""

    def __init__(self, algorithm: Algorithm, device: torch.device) -> None:
        import torch

        self._algorithm = algorithm
        self._sums = torch.zeros(1 + len(MEANS), device=device)
        self._largest = torch.zeros((), device=device)

    def add(self, distributions: Tensor, logprobs: Tensor, batch: MicroBatch) -> None:
        """Add a forward pass, by the log probabilities under the present weights: `distributions`, [trained,
        vocabulary], and those of the trained tokens, [trained]; raise as `log_ratios`."""
        import torch

        logs = log_ratios(logprobs, batch)
        ratios, bounded = logs.exp(), self._algorithm.bound(logs, batch).exp()
        clipped = (bounded < self._algorithm.ratio_min) | (bounded > self._algorithm.ratio_max)
        moved = torch.expm1(logs) - logs, logs.abs(), ratios > 2, ratios < 0.5, clipped
        of_tokens = torch.ones_like(logs), entropies(distributions), *moved
        self._sums += torch.stack([values.sum() for values in of_tokens])
        self._largest = torch.maximum(self._largest, logs.abs().max())

    def values(self, group: ProcessGroup) -> dict[str, float]:
        """Return the means and the maximum over all tokens of all processes."""
        of_processes = self._sums.new_zeros(group.size)
        of_processes[group.rank] = self._largest
        group.add_up(self._sums)
        group.add_up(of_processes)
        tokens, *sums = self._sums.tolist()
        means = {name: total / max(tokens, 1.0) for name, total in zip(MEANS, sums, strict=True)}
        return means | {MAXIMUM: float(of_processes.max())}


def entropies(distributions: Tensor) -> Tensor:
    """Return entropies in nats, [tokens], of log probabilities [tokens, vocabulary], without a gradient."""
    import torch

    pieces = torch.split(distributions.detach(), PIECE)
    return torch.cat([-(piece.exp() * piece).sum(-1) for piece in pieces])
