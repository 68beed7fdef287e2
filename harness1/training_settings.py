"""How policies are trained: `[sft]` makes rows of teachers' episodes, `[rl]` of the policy's own, `[train]` is the
trainer's. None is in `env_hash`; defaults are the published recipe (Harness-1, arXiv 2606.02373, appendix on
training)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from harness1.errors import ConfigError
from harness1.hashing import digest
from harness1.settings import Count, Positive, Settings, Share, Weight

Moment = Annotated[float, Meta(ge=0.0, lt=1.0)]
Rate = Annotated[float, Meta(gt=0.0)]


class Gates(Settings):
    """Which of a teacher's episodes are learned from."""

    recall: Share = 0.10
    """Curated recall below this is no example."""
    documents: Positive = 1
    """Curated documents, at least."""
    tools: Positive = 1
    """Different tools that an episode must have used with success."""
    tool_share: Share = 0.0
    """Tool-mix floor: each tool that the environment offers has at least this share of the turns of the kept episodes,
    or the collection is refused."""
    near: Share = 0.8
    """Two queries whose word sets are at least this alike (Jaccard, estimated by MinHash) count as the same."""
    quotas: dict[str, Positive] = {}
    """Episodes kept of each dataset, by its name; of others: all."""

    def __hash__(self) -> int:
        # A configuration is a key of caches, and a mapping has no hash of its own.
        return hash(digest(self))


class Sft(Settings):
    """From episodes to rows."""

    gates: Gates = Gates()
    rows: Literal["turn", "epoch"] = "turn"
    """One row for each turn, or one for each chain of turns whose prompts are proven prefixes of each other."""
    max_tokens: Positive = 32768
    """Longer rows are dropped and counted."""
    repeated_weight: Share = 1.0
    """Weight of a turn whose tool was that of both turns before it; 1: as every other."""
    held_out: Share = 0.05
    """Share of the tasks that is never trained on, and watched instead."""
    seed: Count = 42


class Lora(Settings):
    """Low-rank adapters on all linear layers but the head (Hu et al., arXiv 2106.09685). Experts of a mixture that are
    bare parameters have none, nor has their router."""

    rank: Count = 32
    """0: none, all weights are trained."""
    alpha: Rate = 32.0
    """Adapters are scaled by alpha / rank."""


class Watch(Settings):
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
    watch: Watch = Watch()

    def __post_init__(self) -> None:
        if self.watch.patience and not self.watch.every:
            raise ConfigError("train.watch.patience counts looks: it needs train.watch.every")
        if self.watch.metric == "curated_recall" and not self.watch.tasks:
            raise ConfigError("train.watch.metric=curated_recall needs train.watch.tasks")
        if self.watch.metric in ("valid", "tool_agreement") and not self.watch.turns:
            raise ConfigError(f"train.watch.metric={self.watch.metric} needs train.watch.turns")
        if self.watch.metric == "nll" and not self.watch.rows:
            raise ConfigError("train.watch.metric=nll needs train.watch.rows")


class Pivots(Settings):
    """Turns of teachers that are trained on one by one: which are worth it, and what counts as well done (PivotRL,
    arXiv 2603.21383)."""

    samples: Annotated[int, Meta(ge=2)] = 8
    """Actions of the reference policy that a turn is judged by."""
    limit: Share = 0.6
    """Turns at which at least this share of them is right are too easy."""
    held_out: Share = 0.1
    """Share of the tasks whose turns are never trained on."""
    useless: Count = 2
    """Useless documents that an action may leave in the curated set beyond those that the teacher leaves there."""
    slack: Share = 0.0
    """To stop is right with this much less recall than the teacher reached in the end."""
    seed: Count = 42
    """Of what the reference policy draws, and of the split."""


class Rl(Settings):
    """Reinforcement learning: groups of episodes on equal tasks, and what is made of them."""

    algorithm: Literal["cispo", "double_sided", "reinforce"] = "cispo"
    ratio_min: Weight = 0.0
    """Of pi / pi_rollout of a token: `cispo` cuts its weight to the bounds, `double_sided` drops what is beyond."""
    ratio_max: Rate = 5.0
    advantages: Literal["center", "group_std", "batch_std", "leave_one_out"] = "center"
    """Reward minus the mean of the group, divided by nothing, by the deviation within the group or within the step; or
    minus the mean of the others."""
    anchors: Weight = 0.0
    """Weight of a second advantage: of a turn among its siblings' turns in the same state (GiGPO)."""
    normaliser: Literal["token_mean", "trajectory_mean", "group_mean"] = "token_mean"
    kl: Weight = 0.0
    """Weight of the divergence from the policy that training began with, taken out of the advantages."""
    groups: Positive = 128
    """Groups of a batch, each of one task; those whose rewards are all equal are replaced."""
    samples: Annotated[int, Meta(ge=2)] = 8
    """Episodes of a group."""
    substeps: Positive = 4
    """Optimizer steps on a batch."""
    batches: Positive = 80
    staleness: Count = 0
    """Batches that generation may be ahead of training; 0: in turns."""
    window: Share = 0.3
    """Share of the groups at work behind whose oldest training takes none, though it be finished (Forge)."""
    rows: Literal["turn", "epoch"] = "turn"
    headroom: Share = 0.15
    """Tasks whose admission report shows less of it are not sampled."""
    seed: Count = 42
    pivots: Pivots = Pivots()

    def __post_init__(self) -> None:
        if self.ratio_min > self.ratio_max:
            raise ConfigError("rl.ratio_min is above rl.ratio_max")
        if self.substeps > self.groups:
            raise ConfigError("rl.substeps needs at least one group for each")
