"""Sharding: each process of a group holds its share of every weight, gradient and moment (FSDP2,
`torch.distributed.fsdp.fully_shard`; Zhao et al., arXiv 2304.11277). A block is gathered while it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness1.training.process_group import ProcessGroup

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


def shard(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Distribute a model over the processes of a group, block by block, and move it to the device of this process.

    Afterwards each forward and each backward pass is a collective operation: all processes must take equally many.
    Gradients are summed over processes, and not averaged, because losses are sums over rows.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    mesh = init_device_mesh(group.kind, (group.size,))
    blocks: list[nn.Module] = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    for module in (*reversed(blocks), model):  # a part before the whole that holds it
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies


def gathered(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dictionary of a model with whole tensors. Those of a sharded model are on the CPU of the leading
    process, and the others get an empty dictionary; all processes must call this."""
    if not is_sharded(model):
        return dict(model.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    names: dict[Tensor, str] = {}
    first = {name: names.setdefault(value, name) for name, value in model.state_dict(keep_vars=True).items()}
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {name: state[first[name]] for name in state}  # names of one weight share its memory


def forget_gathered(model: PreTrainedModel) -> None:
    """Have the next pass gather all weights anew; a pass without a backward pass leaves some gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(model: PreTrainedModel) -> bool:
    """Return True if `shard` distributed the model."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def whole(value: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a whole one; all processes must call this."""
    from torch.distributed.tensor import DTensor

    made: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return made


def shared_like(value: Tensor, other: Tensor) -> Tensor:
    """Return a whole tensor, which all processes have, distributed as another one is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(other, DTensor):
        return value
    # Each process takes its share of its own copy.
    return distribute_tensor(value.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
