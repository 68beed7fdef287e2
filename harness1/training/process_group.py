"""The processes that train together: each holds a share of the weights and takes a share of a step's passes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness1.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


LONGEST_SILENCE_H = 6  # hours that processes wait for the leading one, while it plays and measures


class Unanimous(UsageError):
    """An error that all processes of a group raise at the same point, so that they can go on together."""


@dataclass
class ProcessGroup:
    """The place of this process among those that train together; a single process by default."""

    rank: int = 0
    size: int = 1
    local: int = 0  # the rank among the processes of this machine, which is also the number of its GPU
    kind: str = "cpu"  # the type of the devices that hold the shards, as in torch
    broken: bool = False  # a process left in the middle of a collective operation: no other can follow

    @property
    def leads(self) -> bool:
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
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()


ALONE = ProcessGroup()


@contextmanager
def join_group(alone: ProcessGroup = ALONE) -> Iterator[ProcessGroup]:
    """Join the group that a launcher (`torchrun`) started this process for. `alone` is the place that it gave."""
    if alone.size <= 1:
        yield alone
        return
    import torch.distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(alone.local)
    silence = timedelta(hours=LONGEST_SILENCE_H)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=silence)
    try:
        yield replace(alone, kind="cuda" if cuda else "cpu")
    finally:
        torch.distributed.destroy_process_group()


def shard(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Distribute a model over the processes of a group, block by block, and move it to the device of this process. Each
    forward and backward pass is then a collective operation: all processes must take equally many. Gradients are summed
    over processes, and not averaged, because losses are sums over rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    mesh = init_device_mesh(group.kind, (group.size,))
    blocks: list[nn.Module] = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    for module in (*reversed(blocks), model):  # a part before the whole that holds it
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies


def gather_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dictionary of a model with whole tensors. Those of a sharded model are on the CPU of the leading
    process, and the others get an empty dictionary; all processes must call this."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return dict(model.state_dict())
    names: dict[Tensor, str] = {}
    first = {name: names.setdefault(value, name) for name, value in model.state_dict(keep_vars=True).items()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return {name: state[first[name]] for name in state}  # names of one weight share its memory


def forget_gathered(model: PreTrainedModel) -> None:
    """Have the next pass gather all weights anew; a pass without a backward pass leaves some gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather(value: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a whole one; all processes must call this."""
    from torch.distributed.tensor import DTensor

    made: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return made


@contextmanager
def delay_interrupt() -> Iterator[None]:
    """Raise an interrupt at the end. Python handles signals in the main thread, so others have none to put off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)
