"""`[reward]`: the value of an episode. It is in `reward_hash`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from harness1.hashing import digest
from harness1.plugins import identity
from harness1.settings import Count, Positive, Settings, Share, Weight, leave_out_default


class Reward(Settings):
    """Weights of the composite terminal reward; defaults as published (Harness-1, arXiv 2606.02373, Table 5)."""

    recipe: Literal["paper", "robust", "sum"] = "paper"
    """Source of the weights that a loaded configuration does not give: the defaults, or `RECIPES`. `sum` pays for the
    terms with a weight alone, without `empty` and `floor`."""
    recall: float = 0.0
    """Weight of curated recall, the share of the gold that is delivered."""
    outcome: float = 0.7
    """Weight of F_beta of the curated precision and recall. Weights and rewards have no unit; values are shares of
    1."""
    beta: Annotated[float, Meta(gt=0.0)] = 2.0
    """How many times recall weighs as much as precision in F_beta."""
    trajectory: float = 0.3
    """Weight of trajectory recall: the share of the gold that the episode has seen."""
    answer_found: float = 1.0
    """Weight of 1 if the set holds some of the answer's evidence, else 0."""
    answer: float = 0.8
    """Weight of the curated recall of the answer's evidence."""
    trajectory_answer: float = 0.4
    """Weight of the share of the answer's evidence that the episode has seen."""
    answer_missed: float = 0.35
    """Cost of the answer's evidence that was seen and not delivered, as a share."""
    recall_gap: float = 0.0
    """Cost of gold that was seen and not delivered, as a share; 0: none, as published."""
    clutter: float = 0.0
    """The cost of a full set of only irrelevant units."""
    diversity: float = 0.15
    """Weight of the tools used successfully as a share of `diversity_target`."""
    diversity_target: Positive = 6
    """Different tools that earn all of `diversity`; at most those offered."""
    diversity_shortfall: float = 0.0
    """Cost of each tool below `diversity_target`."""
    curation: float = 0.0
    """Weight of the turns that curated as a share of `curation_target`."""
    curation_target: Share = 0.40
    """Share of the turns that earns all of `curation`; 0: any."""
    turn_penalty: float = 0.02
    """Cost of using all turns; it rises from 0 at `turn_penalty_from`."""
    turn_penalty_from: Count = 20
    """Turns that cost nothing."""
    process_cap: Weight = 0.5
    """Limit on the absolute sum of diversity, its shortfall, curation and turns."""
    empty: float = -0.2
    """Reward of an episode that delivers nothing, in place of the sum."""
    format_failure: float = -0.5
    """Reward of an episode that ended without a readable call, in place of the sum."""
    floor: float = 0.001
    """Smallest sum, so that a delivered set earns more than none."""
    plugins: dict[str, float] = {}
    """Weights of terms of other packages, by the names of their entry points (`harness1.rewards`), or of one's own, as
    `FILE.py:NAME`; negative for penalties. None counts because it is installed."""

    def __hash__(self) -> int:
        # A configuration is a key of caches, and a mapping is not hashable.
        return hash(digest(self))

    def hashed(self) -> dict[str, Any]:
        """Return the settings that enter hashes, which are older than `plugins` and `recall`: these count where they
        are set. A file of one's own counts by its content."""
        tree: dict[str, Any] = msgspec.to_builtins(self)
        tree["plugins"] = {identity(name): weight for name, weight in self.plugins.items()}
        leave_out_default(tree, {"plugins": {}}, "plugins")
        leave_out_default(tree, {"recall": 0.0}, "recall")
        return tree


TERMS = (
    *("outcome", "recall", "trajectory", "answer_found", "answer", "trajectory_answer", "answer_missed", "recall_gap"),
    *("clutter", "diversity", "diversity_shortfall", "curation", "turn_penalty"),
)
"""The settings that are weights of terms."""
RECIPES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    msgspec.toml.decode(Path(__file__).with_name("recipes.toml").read_bytes(), type=dict[str, dict[str, float]])
)
"""The settings in which a recipe differs from the defaults."""


def sum_of(weights: Mapping[str, float]) -> Reward:
    """Return the reward that is the sum of some terms and nothing else.

    Args:
        weights: by the name of a term: one of `TERMS`, of another package, or `FILE.py:NAME`.
    """
    ours = {name: weight for name, weight in weights.items() if name in TERMS}
    others = {name: weight for name, weight in weights.items() if name not in TERMS}
    return msgspec.convert({**RECIPES["sum"], **ours, "recipe": "sum", "plugins": others}, Reward)


def with_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given `[reward]` settings on top of those of the recipe that they name."""
    recipe = given.get("recipe")
    return {**RECIPES.get(recipe, {}), **given} if isinstance(recipe, str) else dict(given)
