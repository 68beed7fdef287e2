"""The sampling distribution and the drawing of tokens: pure functions, shared by decoding and by its check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness1.errors import UsageError
from harness1.records import Sampling

if TYPE_CHECKING:
    from torch import Tensor


def check_sampling(sampling: Sampling) -> None:
    """Refuse sampling parameters out of range.

    Raises:
        UsageError: a value is out of its range.
    """
    if not sampling.temperature >= 0:
        raise UsageError(f"the temperature must be 0 or more, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise UsageError(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k < 0:
        raise UsageError(f"top_k must be 0 (no limit) or more, not {sampling.top_k}")
    if sampling.max_tokens < 1:
        raise UsageError(f"max_tokens must be at least 1, not {sampling.max_tokens}")


def processed_logprobs(logits: Tensor, sampling: Sampling, mask: Tensor | None = None) -> Tensor:
    """Return the log probabilities that `sampling` draws from: grammar mask, temperature, top_k, top_p, in this order.

    The rest is renormalised after each cut. At temperature 0 the most likely token has 0 and all others -inf.

    Args:
        logits: [..., vocabulary], of any floating type.
        mask: bool, broadcastable to `logits`; False where a grammar forbids the token.

    Returns:
        float32, of the shape of `logits`; differentiable.
    """
    import torch

    logits = logits.float()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if sampling.temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        logits = logits.masked_fill(~_nucleus(logits, sampling.top_p), -torch.inf)
    return logits.log_softmax(-1)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Return a bool mask of the most likely tokens whose probabilities add up to `top_p`, the last one included.

    From: Holtzman et al., "The curious case of neural text degeneration", ICLR 2020.
    """
    import torch

    likely, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    kept = likely.cumsum(-1) - likely < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def draw(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id for each row by inversion of the cumulative distribution.

    Args:
        logprobs: [rows, vocabulary], as returned by `processed_logprobs`.
        uniforms: [rows], float64 in [0, 1), one draw of each row's own generator.

    Returns:
        [rows], int64. A token of probability 0 is never drawn; for a row that is not finite the id is arbitrary.
    """
    import torch

    cumulative = logprobs.double().exp().cumsum(-1)
    aims = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, aims, right=True).squeeze(-1).clamp(max=logprobs.shape[-1] - 1)
