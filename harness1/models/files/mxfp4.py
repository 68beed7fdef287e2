"""MXFP4, the type of gpt-oss's experts: numbers of four bits, and a power of two for every 32 of them (OCP Microscaling
Formats 1.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1: the numbers of the lower three bits; the fourth is the sign."""
BIAS = 127
"""Of the exponents, which are bytes (E8M0)."""
BLOCK = 32
"""Numbers that share an exponent, two in a byte, the lower half first."""


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as models multiply with it, [inputs, outputs].

    Args:
        blocks: [outputs, inputs / 32, 16], bytes.
        scales: [outputs, inputs / 32], bytes: exponents.

    Every number is exact in bfloat16 and float32 (one bit of mantissa), unless it overflows.
    """
    import torch

    signed = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], dim=-1)  # [byte, half]
    powers = torch.exp2(scales.float() - BIAS)
    numbers = pairs[blocks.int()].flatten(-2) * powers.unsqueeze(-1)
    return numbers.flatten(-2).T.to(dtype).contiguous()
