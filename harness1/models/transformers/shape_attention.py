"""Attentions for counting memory.

A fused kernel (FlashAttention, arXiv 2205.14135) keeps queries, keys, values, its output, and one logarithm of a sum
per head and query: its memory is linear in the length. `LINEAR` stands for every such kernel. `SDPA` is torch's own
with the mask that transformers gives it when no row is padded; transformers itself cannot tell that without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

LINEAR, SDPA = "harness1_linear", "harness1_sdpa"


def register_shape_attentions() -> None:
    """Make both known to transformers; models that use them must have no data."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    for name, attention, mask in ((LINEAR, _attend, _no_mask), (SDPA, sdpa_attention_forward, _sdpa_mask)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _sdpa_mask(batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, **_: Any) -> Any:
    """Return None where the kernel's own causal order is enough, else a mask of booleans."""
    import torch

    if local_size is None or kv_length < local_size:
        return None
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return an output of the shape of transformers' attention, [rows, tokens, heads, width]."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows, heads, tokens, _ = query.shape  # kernels lay heads beside each other, so that no copy follows
            made = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
            context.save_for_backward(query, key, value, made, sums)
            return made

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            query, key, value, _, sums = context.saved_tensors
            torch.empty_like(sums)  # the inner products of outputs and their gradients
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    attended: Tensor = Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2), None
