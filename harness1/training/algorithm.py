"""The losses that a trainer minimises, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from harness1.config import Rl
from harness1.errors import UsageError
from harness1.rows.row import TrainRow
from harness1.training.cispo import Cispo, DoubleSided, Interaction, Reinforce

if TYPE_CHECKING:
    from torch import Tensor

    from harness1.training.micro_batch import MicroBatch


class Algorithm(Protocol):
    """A loss over trained tokens.

    The loss of an optimizer step is the sum of `token_losses` over its tokens, divided by the `normaliser` of its rows.
    The normaliser is known first, so the division into micro-batches and processes does not change the loss.
    """

    @property
    def ratio_min(self) -> float:
        """Ratio of probabilities (present to sampled), as `bounded` gives it, below which a token counts as clipped."""
        ...

    @property
    def ratio_max(self) -> float:
        """Ratio above which a token counts as clipped."""
        ...

    def bounded(self, log_ratios: Tensor, batch: MicroBatch) -> Tensor:
        """Return the logarithm of the ratio that the bounds apply to, for each token, [trained], from its own."""
        ...

    def normaliser(self, rows: Sequence[TrainRow]) -> float:
        """Return the divisor of the summed loss; it is additive over rows."""
        ...

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the loss of each trained token, [trained], from its log probability under the present weights."""
        ...


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """`-w log p` over the sum of the weights w, as in supervised fine-tuning. A row's advantages are its weights; the
    default is 1."""

    ratio_min: ClassVar[float] = 0.0
    ratio_max: ClassVar[float] = inf

    def bounded(self, log_ratios: Tensor, batch: MicroBatch) -> Tensor:
        return log_ratios

    def normaliser(self, rows: Sequence[TrainRow]) -> float:
        return sum(
            sum(row.loss_mask)
            if row.advantages is None
            else sum(weight for weight, mask in zip(row.advantages, row.loss_mask, strict=True) if mask)
            for row in rows
        )

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return -batch.weights * logprobs


ALGORITHMS: Mapping[str, Callable[[Rl], Algorithm]] = MappingProxyType(
    {
        "nll": lambda _: NegativeLogLikelihood(),
        "cispo": lambda rl: Cispo(rl.ratio_min, rl.ratio_max),
        "double_sided": lambda rl: DoubleSided(rl.ratio_min, rl.ratio_max),
        "interaction": lambda rl: Interaction(rl.ratio_min, rl.ratio_max),
        "reinforce": lambda _: Reinforce(),
    }
)
"""Losses by name. Those of reinforcement learning are also listed in `Rl.algorithm`."""


def make_algorithm(name: str, rl: Rl | None = None) -> Algorithm:
    """Return the loss with a name; `rl` holds the bounds of the ratio. Raise UsageError if the name is unknown."""
    if name not in ALGORITHMS:
        raise UsageError(f"there is no loss {name!r}; choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](rl or Rl())
