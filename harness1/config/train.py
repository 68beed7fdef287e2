"""`[train]`: the trainer, whichever the algorithm. It is not in `env_hash`; defaults are the published recipe
(Harness-1, arXiv 2606.02373, appendix on training)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from harness1.errors import ConfigError
from harness1.settings import Count, Positive, Rate, Settings, Share, Weight

Moment = Annotated[float, Meta(ge=0.0, lt=1.0)]


class Lora(Settings):
    """Low-rank adapters on all linear layers but the head (Hu et al., arXiv 2106.09685). Experts of a mixture that are
    bare parameters have none, nor has their router."""

    rank: Count = 32
    """0: none, all weights are trained."""
    alpha: Rate = 32.0
    """Adapters are scaled by alpha / rank."""


class Validation(Settings):
    """What is measured on held-out tasks while training goes on."""

    every: Count = 50
    """Steps between two looks; 0: only at the end."""
    rows: Count = 64
    """Held-out rows whose loss is taken."""
    turns: Count = 32
    """Held-out turns that the policy is asked to take."""
    tasks: Count = 0
    """Held-out tasks on which it runs whole episodes."""
    metric: Literal["nll", "valid", "tool_agreement", "curated_recall", "reward"] = "nll"
    """What decides which checkpoint is the best; `reward` in reinforcement learning alone, and that one by `reward` or
    `curated_recall`."""
    patience: Count = 0
    """Looks without a better value after which training stops; 0: never."""


class Train(Settings):
    """The trainer, whichever the algorithm."""

    epochs: Positive = 3
    batch_rows: Positive = 128
    """Rows of one optimizer step."""
    micro_tokens: Positive = 32768
    """Tokens of one forward pass, padding included; a longer row is a pass of its own."""
    rate: Rate = 5e-6
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the rate falls to 0 behind the warm-up."""
    warmup: Share = 0.0
    """Share of the steps in which the rate rises from 0."""
    beta1: Moment = 0.9
    beta2: Moment = 0.95
    epsilon: Rate = 1e-8
    weight_decay: Weight = 0.0
    clip: Weight = 1.0
    """The largest norm of a gradient; 0: not clipped."""
    lora: Lora = Lora()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What matrices are multiplied in. Trained weights, logits and loss are float32 in both."""
    checkpointing: bool = False
    """Keep no activations within a layer and compute them again in the backward pass."""
    seed: Count = 0
    save_every: Count = 50
    """Steps between two states to resume from; 0: only at the end."""
    watch: Validation = Validation()

    def __post_init__(self) -> None:
        if self.watch.patience and not self.watch.every:
            raise ConfigError("train.watch.patience counts looks: it needs train.watch.every")
        if self.watch.metric == "curated_recall" and not self.watch.tasks:
            raise ConfigError("train.watch.metric=curated_recall needs train.watch.tasks")
        if self.watch.metric in ("valid", "tool_agreement") and not self.watch.turns:
            raise ConfigError(f"train.watch.metric={self.watch.metric} needs train.watch.turns")
        if self.watch.metric == "nll" and not self.watch.rows:
            raise ConfigError("train.watch.metric=nll needs train.watch.rows")
