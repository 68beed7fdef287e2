"""`[rl]`: rows made of the policy's own episodes. Defaults are the published recipe (Harness-1, arXiv 2606.02373,
appendix on training)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from harness1.errors import ConfigError
from harness1.settings import Count, Positive, Rate, Settings, Share, Weight


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
