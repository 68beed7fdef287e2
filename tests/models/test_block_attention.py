"""Attention in blocks computes what torch's attention computes, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harness1.models import block_attention
from harness1.models.block_attention import BlockAttention

ROWS, HEADS, KV_HEADS, WIDTH = 2, 6, 2, 8


def states(heads: int, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, heads, tokens, WIDTH, generator=generator).requires_grad_()


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None].repeat(ROWS, 1, 1, 1)


@pytest.mark.parametrize(
    ("queries", "keys", "padded"),
    [(1, 1, False), (4, 4, False), (11, 11, False), (3, 11, False), (5, 21, False), (11, 11, True)],
)
def test_outputs_and_gradients_are_those_of_torch(
    queries: int, keys: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "BLOCK", 4)
    query, key, value = states(HEADS, queries, 0), states(KV_HEADS, keys, 1), states(KV_HEADS, keys, 2)
    seen = causal(queries, keys)
    if padded:
        seen[1, :, :, 7:] = False
    groups = HEADS // KV_HEADS
    grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    expected = scaled_dot_product_attention(query, *grouped, seen, scale=0.3)
    found = BlockAttention.apply(query, key, value, seen if padded else None, 0.3)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    given = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    for own, theirs in zip(
        torch.autograd.grad(found, (query, key, value), given),
        torch.autograd.grad(expected, (query, key, value), given),
        strict=True,
    ):
        torch.testing.assert_close(own, theirs)
