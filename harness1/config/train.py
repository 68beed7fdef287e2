"""`[train]`: the trainer, for every algorithm. It is not in `env_hash`; defaults are the published recipe (Harness-1,
arXiv 2606.02373, appendix on training)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from harness1.errors import ConfigError
from harness1.settings import Count, Positive, Rate, Settings, Share, Weight

Attention = Literal[
    "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]
Moment = Annotated[float, Meta(ge=0.0, lt=1.0)]


class Lora(Settings):
    """Low-rank adapters on all linear layers but the head (Hu et al., arXiv 2106.09685). The router of a mixture of
    experts has none."""

    rank: Count = 32
    """0: no adapters, all weights are trained."""
    alpha: Rate = 32.0
    """Adapters are scaled by alpha / rank."""
    layers: Count = 0
    """Adapt only the last layers, so many; 0: all. The backward pass ends below them."""
    experts: bool = False
    """Also adapt the experts of a mixture that are 3-D parameters, as in gpt-oss (peft's `target_parameters`)."""


class Validation(Settings):
    """Measurements on held-out tasks during training."""

    every: Count = 50
    """Steps between validations; 0: only at the end."""
    rows: Count = 64
    """Held-out rows whose loss is computed."""
    turns: Count = 32
    """Held-out turns that the policy is asked to take."""
    tasks: Count = 0
    """Held-out tasks on which the policy plays whole episodes."""
    metric: Literal["nll", "valid", "tool_agreement", "curated_recall", "reward"] = "nll"
    """The metric that selects the best checkpoint. Reinforcement learning uses `reward` (only there) or
    `curated_recall`."""
    patience: Count = 0
    """Validations without a better value before training stops; 0: never."""


class Train(Settings):
    """The trainer, for every algorithm."""

    epochs: Positive = 3
    """Passes over the rows of fine-tuning; reinforcement learning counts `rl.batches` instead."""
    batch_rows: Positive = 128
    """Rows per optimizer step."""
    micro_tokens: Positive = 32768
    """Tokens per forward pass, padding included; a longer row gets its own pass."""
    rate: Rate = 5e-6
    """Learning rate after the warm-up, without a unit: that of fine-tuning; that of `--config rl/paper` is 1e-5."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the rate's decay to 0 after the warm-up."""
    warmup: Share = 0.0
    """Share of the steps over which the rate rises from 0."""
    beta1: Moment = 0.9
    """AdamW: share of the running mean of gradients that a step keeps."""
    beta2: Moment = 0.95
    """AdamW: share of the running mean of squared gradients that a step keeps."""
    epsilon: Rate = 1e-8
    """AdamW: added to the divisor of a step, against division by 0."""
    weight_decay: Weight = 0.0
    """AdamW: share of a weight, times the rate, that a step takes off; 0: none."""
    clip: Weight = 1.0
    """Largest gradient norm; 0: no clipping."""
    lora: Lora = Lora()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type for matrix products; `auto` in a file or override: the faster one here. Trained weights, logits and loss are
    float32 either way."""
    attention: Attention = "auto"
    """Implementation of attention, as transformers names it; `auto`: the model's default there, or matrix products of
    blocks for bfloat16 on a processor. Any other than the default is compared with `eager` on a few tokens first.
    `eager` needs memory for the square of a row's length."""
    checkpointing: bool = False
    """Keep no activations within a layer; recompute them in the backward pass."""
    seed: Count = 0
    """Seed of the initial adapters and of the order of rows."""
    save_every: Count = 50
    """Steps between saved states to resume from; 0: only at the end. Ctrl-C saves one too."""
    save_minutes: Weight = 10.0
    """Minutes after which a step, or a batch of reinforcement learning, saves a state even if `save_every` does not ask
    for one; 0: never. TRL's trainer counts steps only."""
    max_steps: Count = 0
    """Optimizer steps of a training run, which the schedule is made for; 0: as many as `epochs`, or `rl.batches`, say.
    Reinforcement learning rounds them up to whole batches of `rl.substeps`."""
    watch: Validation = Validation()

    def __post_init__(self) -> None:
        if self.watch.patience and not self.watch.every:
            raise ConfigError("train.watch.patience counts validations: it needs train.watch.every")
        if self.watch.metric == "curated_recall" and not self.watch.tasks:
            raise ConfigError("train.watch.metric=curated_recall needs train.watch.tasks")
        if self.watch.metric in ("valid", "tool_agreement") and not self.watch.turns:
            raise ConfigError(f"train.watch.metric={self.watch.metric} needs train.watch.turns")
        if self.watch.metric == "nll" and not self.watch.rows:
            raise ConfigError("train.watch.metric=nll needs train.watch.rows")
