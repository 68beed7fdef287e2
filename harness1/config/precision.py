"""The faster type of numbers on this machine, by a short measurement: what `dtype = "auto"` means in settings."""

from __future__ import annotations

import time
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

ROWS, WIDTH, INNER = 512, 576, 1536
"""Sizes of the measured product: a feed-forward layer of SmolLM2-135M over a training row."""
SECONDS = 0.4
"""Time for which each type is measured, after one product that is not counted."""
MARGIN = 1.2
"""bfloat16 is chosen if it is this many times as fast, because it rounds to three digits."""


@cache
def fastest_dtype() -> Literal["float32", "bfloat16"]:
    """Return bfloat16 where matrix products in it are faster than in float32 by `MARGIN` (GPUs that have it, CPUs with
    AVX512-BF16 or AMX), else float32; float32 too where torch is not installed. Takes about a second, and is measured
    once in a process."""
    if find_spec("torch") is None:
        return "float32"
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    speeds = [_products(torch, dtype) for dtype in (torch.float32, torch.bfloat16)]
    return "bfloat16" if speeds[1] > MARGIN * speeds[0] else "float32"


def _products(torch: Any, dtype: Any) -> float:
    """Return products per second."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn((ROWS, WIDTH), generator=generator).to(dtype)
    right = torch.randn((WIDTH, INNER), generator=generator).to(dtype)
    left @ right
    began, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < SECONDS:
        left @ right
        done += 1
    return done / passed
