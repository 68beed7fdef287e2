"""`[data]`, `[sft]`, `[rl]`, `[train]`, `[reward]` and `[policy]`: what is learned from, how, and for which reward.
Defaults are the published recipe (Harness-1, arXiv 2606.02373, appendix on training)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from harness1.config.settings import (
    REMOVED,
    Count,
    Positive,
    Rate,
    Settings,
    Share,
    Weight,
    to_hash,
    to_record,
    without_later,
)
from harness1.errors import ConfigError
from harness1.plain import digest
from harness1.plugins import identity


class Data(Settings):
    """The tasks that may be learned from."""

    leaks: Literal["drop", "keep"] = "drop"
    """Tasks that ask what an evaluation task asks, or share their whole gold set with one: left out, or learned."""
    near: Share = 0.8
    """A task asks what an evaluation task asks if their word sets are at least so similar (Jaccard, by MinHash)."""
    sft_share: Share = 0.3
    """Share of the tasks that `--share sft` takes; `--share rl` takes the others. One gold set is never divided."""


class Gates(Settings):
    """The conditions that a teacher's episode must meet to be trained on."""

    recall: Share = 0.10  # Minimum curated recall.
    precision: Share = 0.0  # Minimum curated precision: who learns from small sets alone delivers little else.
    near: Share = 0.8
    """Two episodes are duplicates if their queries' word sets are at least so similar (Jaccard, by MinHash)."""
    per_task: Count = 0  # Most episodes kept of one task, best first (highest recall, fewest turns); 0: all.
    quotas: dict[str, Positive] = {}  # Maximum number of episodes kept, by dataset name; of other datasets, all.

    def __hash__(self) -> int:
        # A configuration is a key of caches, and a mapping is not hashable.
        return hash(digest(self))


class Sft(Settings):
    """Settings for making rows from episodes."""

    gates: Gates = Gates()
    rows: Literal["turn", "epoch"] = "turn"  # One row per turn, or per chain of turns with prompts that are prefixes.
    max_tokens: Positive = 32768  # Longer rows are dropped and counted.
    useless_weight: Share = 1.0
    """Weight of a search that brought no gold document that was new; 1: like any other. With 0, a student learns from a
    teacher that tries several searches only those that turned out to be right."""
    held_out: Share = 0.05  # Share of the tasks that is used for validation and never trained on.


class Rl(Settings):
    """Reinforcement learning: how groups of episodes on the same task are sampled and trained on."""

    algorithm: Literal["cispo", "double_sided", "interaction", "reinforce"] = "cispo"
    """Weight of a token by its ratio: clipped to the bounds, as published (CISPO, arXiv 2506.13585); 0 at and beyond
    them; the same by the mean ratio of its call (IPA, arXiv 2512.24873); or always 1."""
    ratio: tuple[Weight, Rate] = (0.0, 5.0)
    """Lowest and highest pi / pi_rollout of a token: `cispo` clips its weight to the bounds, `double_sided` drops it
    outside, and `interaction` drops a call whose geometric mean is outside."""
    advantages: Literal["center", "group_std", "batch_std", "leave_one_out"] = "center"
    """Reward minus the mean of the group, undivided or divided by the standard deviation of the group or of the step;
    or reward minus the mean of the group's other episodes."""
    groups: Positive = 128  # Groups per batch, each of one task; those whose rewards are all equal are replaced.
    samples: Annotated[int, Meta(ge=2)] = 8  # Episodes per group.
    substeps: Positive = 4  # Optimizer steps per batch.
    batches: Positive = 80  # Batches of a training run.
    staleness: Count = 0  # Number of batches by which generation may run ahead of training; 0: they alternate.
    rows: Literal["turn", "epoch"] = "turn"  # One row per turn, or per chain of turns with prompts that are prefixes.
    seed: Count = 42  # Seed of the order of tasks, of their episodes, and of the held-out tasks.

    def __post_init__(self) -> None:
        if self.ratio[0] > self.ratio[1]:
            raise ConfigError(f"rl.ratio must begin with the lower bound, not be {list(self.ratio)}")
        if self.substeps > self.groups:
            raise ConfigError("rl.substeps must not be greater than rl.groups: each needs a group")


Attention = Literal[
    "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]


class Lora(Settings):
    """Low-rank adapters on all linear layers but the head and routers (Hu et al., arXiv 2106.09685)."""

    rank: Count = 32  # 0: no adapters, all weights are trained.
    alpha: Rate = 32.0  # Adapters are scaled by alpha / rank.
    layers: Count = 0  # Adapt only the last layers, so many; 0: all. The backward pass ends below them.
    experts: bool = False  # Also adapt experts that are 3-D parameters, as in gpt-oss (`target_parameters`).


class Validation(Settings):
    """Measurements on held-out tasks during training."""

    every: Count = 50  # Steps between validations; 0: only at the end.
    rows: Count = 64  # Held-out rows whose loss is computed.
    turns: Count = 32  # Held-out turns that the policy is asked to take.
    tasks: Count = 0  # Held-out tasks on which the policy plays whole episodes.
    metric: Literal["nll", "valid", "tool_agreement", "curated_recall", "reward"] = "nll"
    """The metric that selects the best checkpoint; of RL: `reward` (only there) or `curated_recall`."""


class Train(Settings):
    """The trainer, for every algorithm."""

    epochs: Positive = 3  # Passes over the rows of fine-tuning; reinforcement learning counts `rl.batches` instead.
    batch_rows: Positive = 128  # Rows per optimizer step.
    micro_tokens: Positive = 32768  # Tokens per forward pass, padding included; a longer row gets its own pass.
    rate: Rate = 5e-6  # Learning rate after the warm-up, without a unit, of fine-tuning; `--config rl/paper` has 1e-5.
    schedule: Literal["constant", "linear", "cosine"] = "linear"  # Shape of the rate's decay to 0 after the warm-up.
    warmup: Share = 0.0  # Share of the steps over which the rate rises from 0.
    lora: Lora = Lora()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type for matrix products; `auto`: the faster one here. Trained weights, logits and loss are always float32."""
    attention: Attention = "auto"
    """Implementation of attention, as transformers names it; `auto`: the model's default there, or matrix products of
    blocks for bfloat16 on a processor. Any other than the default is compared with `eager` on a few tokens first.
    `eager` needs memory for the square of a row's length."""
    checkpointing: bool = False  # Keep no activations within a layer; recompute them in the backward pass.
    seed: Count = 0  # Seed of the initial adapters and of the order of rows.
    save_every: Count = 50  # Steps between saved states to resume from; 0: only at the end. Ctrl-C saves one too.
    max_steps: Count = 0
    """Optimizer steps of a training run, which the schedule is made for; 0: as many as `epochs`, or `rl.batches`, say.
    Reinforcement learning rounds them up to whole batches of `rl.substeps`."""
    watch: Validation = Validation()

    def __post_init__(self) -> None:
        if self.watch.metric == "curated_recall" and not self.watch.tasks:
            raise ConfigError("train.watch.metric=curated_recall needs train.watch.tasks")
        if self.watch.metric in ("valid", "tool_agreement") and not self.watch.turns:
            raise ConfigError(f"train.watch.metric={self.watch.metric} needs train.watch.turns")
        if self.watch.metric == "nll" and not self.watch.rows:
            raise ConfigError("train.watch.metric=nll needs train.watch.rows")


PUBLISHED: Mapping[str, float] = MappingProxyType(
    {"outcome": 0.7, "recall": 0.0, "trajectory": 0.3, "answer_found": 1.0, "answer": 0.8, "trajectory_answer": 0.4}
    | {"answer_missed": 0.35, "clutter": 0.0, "diversity": 0.15, "turn_penalty": 0.02}
)
"""Of each built-in term; `answer_missed`, `clutter` and `turn_penalty` are costs."""
TERMS = tuple(PUBLISHED)


class Reward(Settings):
    """The composite terminal reward; defaults as published (Harness-1, arXiv 2606.02373, Table 5)."""

    recipe: Literal["paper", "robust", "sum"] = "paper"
    """Source of what a loaded configuration does not give: the defaults, or `RECIPES`. `sum` pays for the terms with a
    weight alone; the others also have a smallest sum, and a reward of its own for an empty set."""
    weights: dict[str, float] = msgspec.field(default_factory=lambda: dict(PUBLISHED))
    """Weight of each term by name: of `harness1.reward`, of other packages (`harness1.rewards`), or of one's own, as
    `FILE.py:NAME`, negative for penalties. None counts because it is installed. Weights have no unit."""

    def __hash__(self) -> int:
        # A configuration is a key of caches, and a mapping is not hashable.
        return hash(digest(self))

    @property
    def beta(self) -> float:
        """How many times recall weighs as much as precision in the term `outcome`."""
        return self._of_recipe("beta")

    @property
    def empty(self) -> float:
        """Reward of an episode that delivers nothing, in place of the sum."""
        return self._of_recipe("empty")

    @property
    def floor(self) -> float:
        """Smallest sum, so that a delivered set earns more than none."""
        return self._of_recipe("floor")

    def _of_recipe(self, name: str) -> float:
        return float(REMOVED[f"reward.{name}"].default_in({"recipe": self.recipe}))

    @property
    def others(self) -> dict[str, float]:
        """The weights of terms that are not built in."""
        return {name: weight for name, weight in self.weights.items() if name not in PUBLISHED}

    def to_hash(self) -> dict[str, Any]:
        """Return the settings that enter hashes, each weight by itself. A file of one's own counts by its content."""
        tree = to_record(self, "reward.")
        weights = tree.pop("weights")
        tree |= {name: weights.get(name, 0.0) for name in TERMS}
        tree["plugins"] = {identity(name): weight for name, weight in self.others.items()}
        return without_later(tree, "reward.")


RECIPES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    msgspec.toml.decode(Path(__file__).with_name("recipes.toml").read_bytes(), type=dict[str, dict[str, float]])
)
"""The settings in which a recipe differs from the defaults."""


def sum_of(weights: Mapping[str, float]) -> Reward:
    """Return the reward that is the sum of some terms and nothing else; `weights` by name, as in `Reward.weights`."""
    return msgspec.convert(with_recipe({"recipe": "sum", "weights": dict(weights)}), Reward)


def with_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given `[reward]` settings on top of those of the recipe that they name."""
    recipe = given.get("recipe")
    return with_weights({**RECIPES.get(recipe, {}), **given} if isinstance(recipe, str) else given)


def with_weights(reward: Mapping[str, Any]) -> dict[str, Any]:
    """Return `[reward]` with all weights in one mapping; in older records they stand beside it and in `plugins`."""
    given = [reward.get(name, {}) for name in ("plugins", "weights")]
    if not all(isinstance(each, dict) for each in given):
        return dict(reward)  # which is refused where it is read
    rest = {name: value for name, value in reward.items() if name not in (*TERMS, "plugins")}
    beside = {name: reward[name] for name in TERMS if name in reward}
    return rest | {"weights": {**PUBLISHED, **beside, **given[0], **given[1]}}


AUTO = "auto"
"""Of `policy.format`: the tokenizer's own. Of `policy.dtype` and `train.dtype`: the faster type on this machine; a
`Config` holds the type itself, so that records say what was computed."""
FORMATS = ("hermes", "harmony", "compact")  # The chat formats that are built in.


class ChatPolicy(Settings):
    """Prompting and sampling of any language model. It is in `policy_hash`."""

    format: str = AUTO
    """`auto`: that of the model's tokenizer; or `hermes`, `harmony`, `compact`, or a plugin's (`harness1.formats`)."""
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0  # 0: greedy.
    format_retries: Count = 3  # Further attempts at a turn whose output holds no call.
    max_tokens: Count = 0
    """Most tokens of an attempt at a turn, at most `env.generation_reserve`, the limit of an attempt after one that was
    cut off. 0: 256 behind a chat server, unless the model thinks, and else the reserve."""
    constrained: bool = False  # Sample under a grammar that allows only calls of the shown tools.
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of a model in this process; `auto` in a file or override: the faster one here. Logits are always float32."""

    def to_hash(self) -> dict[str, Any]:
        return to_hash(self, "policy.")


@cache
def fastest_dtype() -> Literal["float32", "bfloat16"]:
    """Return bfloat16 where it is calculated with: on GPUs that have it, and on CPUs with AVX512-BF16 or AMX, where it
    is more than 1.2 times as fast, at a rounding to three digits; else, and without torch, float32."""
    if find_spec("torch") is None:
        return "float32"
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
