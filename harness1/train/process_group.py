"""Data-parallel training: each process takes a share of a step's passes, and gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


LONGEST_VALIDATION_H = 6
"""Hours that processes wait for the one that plays validation episodes."""


class ProcessGroup(NamedTuple):
    """The rank of this process among those that train together; a single process by default."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """True in the process that writes files and reports progress."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sum over all processes."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.all_reduce(values)

    def broadcast(self, values: dict[str, float]) -> dict[str, float]:
        """Return the values of the leading process in all processes."""
        if self.size <= 1:
            return values
        import torch.distributed

        shared = [values]
        torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0]

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()


ALONE = ProcessGroup()


@contextmanager
def joined_group(size: int, device: str, alone: ProcessGroup = ALONE) -> Iterator[ProcessGroup]:
    """Join the group of `size` processes that a launcher (`accelerate launch`, `torchrun`) started; for one process,
    yield `alone`."""
    if size <= 1:
        yield alone
        return
    import torch.distributed

    own = torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    torch.distributed.init_process_group(
        "nccl" if own.type == "cuda" else "gloo",
        timeout=timedelta(hours=LONGEST_VALIDATION_H),
        device_id=own if own.type == "cuda" else None,
    )
    try:
        yield ProcessGroup(torch.distributed.get_rank(), torch.distributed.get_world_size())
    finally:
        torch.distributed.destroy_process_group()
