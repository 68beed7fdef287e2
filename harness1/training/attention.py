"""The implementation of attention that a model is trained with, checked before it is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness1.errors import UsageError
from harness1.model_folder import first_line
from harness1.models.causal_model import Dtype
from harness1.training.micro_batch import precision

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PROBE = (12, 9)
"""Lengths of the rows of the probe, the second with padding."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest distance of logits from those of eager attention, as a share of their norm. Leaving out a feature, such as
soft caps, changes those of a random model by more."""


def turn_off_cudnn_attention() -> None:
    """Leave cuDNN out of the kernels that torch chooses from for attention on a GPU, in this whole process.

    On an H100 (torch 2.11, Qwen2.5-0.5B in bfloat16, padded rows) gradients became NaN in step 12, twice; without
    cuDNN, in larger passes, they stayed finite. It holds for the process: a context around a forward pass
    does not cover the layers that checkpointing computes again.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def use_attention(model: PreTrainedModel, name: str, dtype: Dtype) -> None:
    """Switch a model to one of transformers' implementations of attention. A small forward and backward pass compares
    it with eager attention, which computes every feature as it is written.

    Args:
        model: on the device, and with the weights' types, that it will be trained with.
        name: as `attn_implementation` of transformers.
        dtype: of matrix products.

    Raises:
        UsageError: the model, the device or the installation cannot run it, or it computes something else.
    """
    refusal = f"train.attention={name} does not train {type(model).__name__} on {model.device.type}"
    model.set_attn_implementation("eager")
    expected = _probe(model, dtype)
    try:
        model.set_attn_implementation(name)
        if (used := model.config._attn_implementation) != name:
            raise UsageError(f"{refusal}: transformers would use {used} instead")
        found = _probe(model, dtype)
    except (RuntimeError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise UsageError(f"{refusal}: {first_line(error)}") from error
    if not float((found - expected).norm() / expected.norm()) <= BOUNDS[dtype]:
        raise UsageError(f"{refusal}: it leaves out something that this model's attention has; try eager")


def use_default_attention(model: PreTrainedModel, dtype: Dtype) -> None:
    """Leave a model its own attention; but for bfloat16 on a processor switch it to `block_attention`, which is faster
    there, if that computes the same."""
    own = model.config._attn_implementation
    if model.device.type != "cpu" or dtype != "bfloat16" or own != "sdpa":
        return
    from harness1.models.block_attention import NAME, register

    register()
    try:
        use_attention(model, NAME, dtype)
    except UsageError:
        model.set_attn_implementation(own)


def _probe(model: PreTrainedModel, dtype: Dtype) -> Tensor:
    """Return the logits of all tokens of the probe, after a backward pass that keeps no gradient of the weights."""
    import torch

    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = (3 * torch.arange(len(PROBE) * max(PROBE)) % vocabulary).view(len(PROBE), -1).to(model.device)
    mask = (torch.arange(max(PROBE)) < torch.tensor(PROBE)[:, None]).long().to(model.device)
    embed = model.get_input_embeddings()
    inputs = embed(ids).detach().requires_grad_()
    with precision(model, dtype):
        logits: Tensor = model(inputs_embeds=inputs, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
    torch.autograd.grad(logits.sum(), inputs)
    return logits.detach()
