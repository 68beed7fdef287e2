"""The loss of `rl train` for prime-rl, by import path: `[trainer.loss] type = "custom"`, `import_path =
"harness1.adapters.prime_rl.cispo_loss"`. `recipes/prime_rl_gpt_oss_20b.toml` uses it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from harness1.training.algorithm import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor


class LossInputs(Protocol):
    """One sequence, as prime-rl gives it (`prime_rl/trainer/rl/loss.py`); every tensor is [tokens]."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    """Booleans: the tokens to train."""
    loss_weights: Tensor | None
    """Weights of tokens; None: 1."""


def cispo_loss(inputs: LossInputs, ratio_min: float = 0.0, ratio_max: float = 5.0) -> Any:
    """Return the sum of -sg(r) A log pi over trained tokens, where r = pi / pi_rollout is clipped to absolute bounds
    and sg stops gradients (CISPO, MiniMax-M1, arXiv 2506.13585), as `loss`, with `metrics` by name: prime-rl's
    `LossOutputs`. It is what our `Cispo` computes: prime-rl divides by the trained tokens of the whole step, and its
    advantages are rewards minus their group's mean (`rl.advantages = "center"`)."""
    chosen = inputs.loss_mask
    logprobs, advantages = inputs.trainer_logprobs[chosen], inputs.advantages[chosen]
    log_ratios = (logprobs.detach() - inputs.inference_logprobs[chosen]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratios = log_ratios.exp()
    clipped = ratios.clamp(ratio_min, ratio_max)
    losses = -clipped * advantages * logprobs
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights[chosen]
    count = max(1, ratios.numel())
    metrics = {
        "cispo/ratio_mean": ratios.sum() / count,
        "cispo/ratio_max": ratios.max() if ratios.numel() else ratios.sum(),
        "cispo/clipped": (clipped != ratios).sum() / count,
        "cispo/k3": (log_ratios.expm1() - log_ratios).sum() / count,
    }
    return SimpleNamespace(loss=losses.sum(), metrics=metrics)
