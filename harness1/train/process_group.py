"""Several processes that train one model: each takes its share of a step's passes, and gradients are added up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


LONGEST_LOOK_H = 6
"""Hours that processes wait for the one that looks at held-out episodes."""


class ProcessGroup(NamedTuple):
    """The place of this process among those that train together; alone by default."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sum over all processes."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.all_reduce(values)

    def told(self, values: dict[str, float]) -> dict[str, float]:
        """What the leading process has, in all of them."""
        if self.size <= 1:
            return values
        import torch.distributed

        told = [values]
        torch.distributed.broadcast_object_list(told, src=0)
        return told[0]

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()


ALONE = ProcessGroup()


@contextmanager
def joined_group(size: int, device: str, alone: ProcessGroup = ALONE) -> Iterator[ProcessGroup]:
    """The group that a launcher (`accelerate launch`, `torchrun`) started; it told torch where its members meet.

    Args:
        size: how many processes are to be joined; with 1 nothing is opened, and `alone` is the group.
    """
    if size <= 1:
        yield alone
        return
    import torch.distributed

    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch.distributed.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        timeout=timedelta(hours=LONGEST_LOOK_H),
        device_id=place if place.type == "cuda" else None,
    )
    try:
        yield ProcessGroup(torch.distributed.get_rank(), torch.distributed.get_world_size())
    finally:
        torch.distributed.destroy_process_group()
