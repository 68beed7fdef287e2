"""Causal attention as matrix products of blocks of queries, for processors that multiply bfloat16: torch's fused
attention computes it there at an eighth of the speed of its matrix products. A block of queries is multiplied with all
keys up to its end, the heads of a group as further rows. The backward pass computes the weights of a block again:
memory grows with the length of a row, as in Dao et al. (arXiv 2205.14135)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn


NAME = "harness1_blocks"
BLOCK = 128  # queries of a block: fewer do not fill a matrix product, more compute more of what no query sees


def register() -> None:
    """Make `NAME` known to transformers, with the masks of its `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention for transformers' `AttentionInterface`, without soft caps, sinks and dropout: query, key and
    value are [rows, heads, tokens, width] (keys and values may have fewer heads), the mask is bool, [rows, 1, tokens,
    tokens], True where a query sees a key (None: all up to its own), the result [rows, tokens, heads, width]."""
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    # Under automatic mixed precision the rotation leaves queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: Tensor = BlockAttention.apply(query, key, value, attention_mask, scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


class BlockAttention(torch.autograd.Function):
    """softmax(scale Q K^T) V, where the queries are the last of the keys' tokens and see nothing behind their own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Return the outputs, [rows, heads, tokens, width]."""
        rows, heads, new, width = query.shape
        blocks = _Blocks(query, key, mask, scale)
        values, out = value.flatten(0, 1), query.new_empty(rows * key.shape[1], heads // key.shape[1], new, width)
        for begin, end, seen in blocks.spans():
            product = torch.bmm(blocks.weights(begin, end), values[:, :seen])
            out[:, :, begin:end] = product.view(out.shape[0], -1, end - begin, width)
        out = out.view(rows, heads, new, width)
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, mask, out = ctx.saved_tensors
        blocks = _Blocks(query, key, mask, ctx.scale)
        values, of_out = value.flatten(0, 1), blocks.grouped(gradients[0].to(query.dtype))
        # The softmax subtracts from each row the sum of weights times their gradients, which is <out, its gradient>.
        sums = blocks.grouped((gradients[0].float() * out.float()).sum(-1, keepdim=True).to(query.dtype))
        of_query = torch.empty_like(blocks.queries)
        of_keys, of_values = (torch.zeros_like(each, dtype=torch.float32) for each in (blocks.keys, values))
        for begin, end, seen in blocks.spans():
            weights, given = blocks.weights(begin, end), of_out[:, :, begin:end].flatten(1, 2)
            of_values[:, :seen] += torch.bmm(weights.mT, given)
            scores = torch.bmm(given, values[:, :seen].mT)
            scores.sub_(sums[:, :, begin:end].flatten(1, 2)).mul_(weights)
            of_query[:, :, begin:end] = torch.bmm(scores, blocks.keys[:, :seen]).view(of_query[:, :, begin:end].shape)
            of_keys[:, :seen] += torch.bmm(scores.mT, blocks.queries[:, :, begin:end].flatten(1, 2))
        of_query = (of_query * ctx.scale).view(query.shape)  # those of the blocks are scaled already
        of_keys, of_values = of_keys.to(key.dtype).view(key.shape), of_values.to(value.dtype).view(value.shape)
        return of_query, of_keys, of_values, None, None


class _Blocks:
    """The weights of attention, a block of queries at a time: [rows * key heads, group * queries, keys seen]."""

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> None:
        self._kv_heads, self._mask = key.shape[1], mask
        self.queries, self.keys = self.grouped(query * scale), key.flatten(0, 1)
        self._new, self._before = query.shape[2], key.shape[2] - query.shape[2]

    def grouped(self, states: Tensor) -> Tensor:
        """Return [rows * key heads, heads of a group, tokens, width] of [rows, heads, tokens, width]."""
        rows, heads = states.shape[:2]
        return states.reshape(rows * self._kv_heads, heads // self._kv_heads, *states.shape[2:])

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first query of each block, the one after its last, and the number of keys that this last sees."""
        for begin in range(0, self._new, BLOCK):
            end = min(begin + BLOCK, self._new)
            yield begin, end, self._before + end

    def weights(self, begin: int, end: int) -> Tensor:
        count, seen = end - begin, self._before + end
        scores = torch.bmm(self.queries[:, :, begin:end].flatten(1, 2), self.keys[:, :seen].mT)
        each = scores.view(-1, self._kv_heads, self.queries.shape[1], count, seen)
        lowest = torch.finfo(scores.dtype).min
        if self._mask is None:
            later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
            each[..., seen - count :].masked_fill_(later, lowest)
        else:
            each.masked_fill_(~self._mask[:, :, None, begin:end, :seen], lowest)
        return torch.softmax(scores, -1)
