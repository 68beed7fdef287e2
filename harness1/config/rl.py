"""`[rl]`: reinforcement learning on the policy's own episodes. Defaults are the published recipe (Harness-1, arXiv
2606.02373, appendix on training)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from harness1.errors import ConfigError
from harness1.settings import Count, Positive, Rate, Settings, Share, Weight

Discount = Annotated[float, Meta(gt=0.0, le=1.0)]


class Pivots(Settings):
    """Single turns of teachers to train on: how they are chosen, and which actions are right (PivotRL, arXiv
    2603.21383)."""

    samples: Annotated[int, Meta(ge=2)] = 8
    """Actions of the reference policy by which a turn is judged."""
    limit: Share = 0.6
    """Turns are too easy if at least this share of those actions is right."""
    held_out: Share = 0.1
    """Share of the tasks whose turns are never trained on."""
    useless: Count = 2
    """Useless documents that an action may leave in the curated set beyond those that the teacher leaves there."""
    slack: Share = 0.0
    """Stopping is right with up to this much less recall than the teacher reached in the end."""
    seed: Count = 42
    """Seed of the reference policy's samples and of the split."""


class StartGate(Settings):
    """How much the trainer's log probabilities of the first batch may differ from the sampler's, by their types,
    `policy.dtype` and `train.dtype`; a larger one is refused: other weights or prompts would cause it."""

    exact: Rate = 1e-4
    """Both float32: the largest difference of a token. Only the order of computation differs."""
    same: Rate = 5e-3
    """Both of the same half precision: the mean k3. Trainer and sampler round at different places: about 1e-3 with
    the same weights."""
    mixed: Rate = 5e-3
    """Of different types: the mean k3."""


class Rl(Settings):
    """Reinforcement learning: how groups of episodes on the same task are sampled and trained on."""

    algorithm: Literal["cispo", "double_sided", "interaction", "reinforce"] = "cispo"
    """Weight of a token by its ratio: clipped to the bounds, as published (CISPO, arXiv 2506.13585); 0 at and beyond
    them; the same by the mean ratio of its call (IPA, arXiv 2512.24873); or always 1."""
    ratio_min: Weight = 0.0
    """Lowest pi / pi_rollout of a token: `cispo` clips its weight to the bounds, `double_sided` drops it outside, and
    `interaction` drops a call whose geometric mean is outside."""
    ratio_max: Rate = 5.0
    """Highest pi / pi_rollout of a token, used like `ratio_min`."""
    advantages: Literal["center", "group_std", "batch_std", "leave_one_out"] = "center"
    """Reward minus the mean of the group, undivided or divided by the standard deviation of the group or of the step;
    or reward minus the mean of the group's other episodes."""
    discount: Discount = 1.0
    """Share of its advantage that each turn passes to the one before it: the last turn has the episode's advantage, the
    k-th before it `discount`^k of it (chunk returns of IPA); 1: all turns are alike."""
    normaliser: Literal["token_mean", "trajectory_mean", "group_mean"] = "token_mean"
    """What counts equally in the loss: each trained token, each episode, or each group."""
    groups: Positive = 128
    """Groups per batch, each of one task; those whose rewards are all equal are replaced."""
    samples: Annotated[int, Meta(ge=2)] = 8
    """Episodes per group."""
    substeps: Positive = 4
    """Optimizer steps per batch."""
    batches: Positive = 80
    """Batches of a training run."""
    staleness: Count = 0
    """Number of batches by which generation may run ahead of training; 0: they alternate."""
    window: Share = 0.3
    """Share of the open groups, oldest first, that training may take from; later ones wait even if finished (Forge)."""
    rows: Literal["turn", "epoch"] = "turn"
    """One row per turn, or one per chain of turns whose prompts are proven prefixes of each other."""
    headroom: Share = 0.15
    """Minimum headroom in its admission report for a task to be sampled."""
    easy: Share = 0.9
    """Mean score of a policy that does not think, as a share of the oracle's gain, from which `rl check` refuses the
    task set: there is nothing left to learn. 1: never."""
    seed: Count = 42
    """Seed of the order of tasks, of their episodes, and of the held-out tasks."""
    pivots: Pivots = Pivots()
    gate: StartGate = StartGate()

    def __post_init__(self) -> None:
        if self.ratio_min > self.ratio_max:
            raise ConfigError("rl.ratio_min must not be greater than rl.ratio_max")
        if self.substeps > self.groups:
            raise ConfigError("rl.substeps must not be greater than rl.groups: each needs a group")
