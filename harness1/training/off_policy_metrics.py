"""Metrics of the distance between a policy and the one that sampled its rows, for each policy gradient step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness1.training.algorithm import Algorithm
from harness1.training.cispo import log_ratios
from harness1.training.process_group import ProcessGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from harness1.training.micro_batch import MicroBatch

MEANS = ("entropy", "k3", "log_ratio_mean", "ratio_above_2", "ratio_below_half", "clipped")
"""Means over trained tokens, with r = pi / pi_rollout: the entropy of pi in nats; r - 1 - log r, which estimates
KL(pi_rollout || pi) (Schulman, "Approximating KL divergence", 2020); |log r|; and the shares of tokens with r > 2, with
r < 1/2, and with a ratio beyond the bounds of the algorithm: their own, or that of their call."""
MAXIMUM = "log_ratio_max"
"""The greatest |log r|, after clipping."""
PIECE = 256
"""Tokens whose entropy is computed at once, to save memory."""


class OffPolicyMetrics:
    """Sums over the forward passes of a step, in all processes. The algorithm's bounds define clipped tokens."""

    def __init__(self, algorithm: Algorithm, device: torch.device) -> None:
        import torch

        self._algorithm = algorithm
        self._sums = torch.zeros(1 + len(MEANS), device=device)
        self._largest = torch.zeros((), device=device)

    def add(self, distributions: Tensor, logprobs: Tensor, batch: MicroBatch) -> None:
        """Add a forward pass.

        Args:
            distributions: [trained, vocabulary], log probabilities under the present weights.
            logprobs: [trained], those of the trained tokens.

        Raises:
            UsageError: the rows have no log probabilities of the rollout.
        """
        import torch

        logs = log_ratios(logprobs, batch)
        ratios, bounded = logs.exp(), self._algorithm.bounded(logs, batch).exp()
        of_tokens = (
            torch.ones_like(logs),
            entropies(distributions),
            torch.expm1(logs) - logs,
            logs.abs(),
            ratios > 2,
            ratios < 0.5,
            (bounded < self._algorithm.ratio_min) | (bounded > self._algorithm.ratio_max),
        )
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
