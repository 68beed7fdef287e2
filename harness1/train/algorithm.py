"""What a trainer minimises: an algorithm is two hooks, and is chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from harness1.config import Rl
from harness1.errors import UsageError
from harness1.rows.row import TrainRow
from harness1.train.cispo import Cispo, DoubleSided, Reinforce

if TYPE_CHECKING:
    from torch import Tensor

    from harness1.train.micro_batch import MicroBatch


class Algorithm(Protocol):
    """A loss over trained tokens.

    The loss of an optimizer step is the sum of `token_losses` over all of its tokens, divided by the `normaliser` of
    all of its rows. The second is known before the first is computed, so that how rows are cut into micro-batches, or
    over processes, changes nothing.
    """

    @property
    def ratio_min(self) -> float:
        """Below this ratio of probabilities, now and when it was sampled, a token counts as clipped."""
        ...

    @property
    def ratio_max(self) -> float:
        """Above this one too."""
        ...

    def normaliser(self, rows: Sequence[TrainRow]) -> float:
        """What the summed loss of these rows is divided by; it adds up over rows."""
        ...

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """[trained]: the loss of each trained token, of its log probability under the present weights."""
        ...


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """`-w log p`, over the sum of the weights w: the mean of supervised fine-tuning. A row's advantages are its
    weights; without them all are 1."""

    ratio_min: ClassVar[float] = 0.0
    ratio_max: ClassVar[float] = inf

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
        "reinforce": lambda _: Reinforce(),
    }
)
"""By name. Adding one is a class, a line here and, for reinforcement learning, its name in `Rl.algorithm`."""


def make_algorithm(name: str, rl: Rl | None = None) -> Algorithm:
    """
    Args:
        rl: where those of reinforcement learning have their bounds from; its defaults by default.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in ALGORITHMS:
        raise UsageError(f"there is no loss {name!r}; choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](rl or Rl())
