"""The processes that train together: each holds a share of the weights and takes a share of a step's passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness1.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_SILENCE_H = 6
"""Hours that processes wait for the leading one, while it plays and measures."""


class Unanimous(UsageError):
    """An error that all processes of a group raise at the same point, so that they can go on together."""


@dataclass
class ProcessGroup:
    """The place of this process among those that train together; a single process by default."""

    rank: int = 0
    size: int = 1
    local: int = 0
    """The rank among the processes of this machine, which is also the number of its GPU."""
    kind: str = "cpu"
    """The type of the devices that hold the shards, as in torch."""
    broken: bool = False
    """A process left in the middle of a collective operation: no other can follow."""

    @property
    def leads(self) -> bool:
        """True in the process that writes files and reports progress."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sum over all processes."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.all_reduce(values)

    def broadcast(self, value: Any) -> Any:
        """Return the value of the leading process in all processes."""
        if self.size <= 1:
            return value
        import torch.distributed

        shared = [value]
        torch.distributed.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
        return shared[0]

    def agree(self, fault: str) -> None:
        """Raise `Unanimous` if one of the processes has a fault; "" stands for none."""
        if self.size <= 1:
            faults = [fault]
        else:
            import torch.distributed

            faults = [""] * self.size
            torch.distributed.all_gather_object(faults, fault)
        if found := next(filter(None, faults), ""):
            raise Unanimous(found)

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()


ALONE = ProcessGroup()


@contextmanager
def joined_group(alone: ProcessGroup = ALONE) -> Iterator[ProcessGroup]:
    """Join the group that a launcher (`torchrun`) started this process for.

    Args:
        alone: the place that the launcher gave; a group of one is not joined.
    """
    if alone.size <= 1:
        yield alone
        return
    import torch.distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(alone.local)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=LONGEST_SILENCE_H)
    )
    try:
        yield replace(alone, kind="cuda" if cuda else "cpu")
    finally:
        torch.distributed.destroy_process_group()
