"""`[reward]`: the value of an episode. It is in `reward_hash`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from harness1.settings import Count, Positive, Settings, Share, Weight


class Reward(Settings):
    """Weights of the composite terminal reward; defaults as published (Harness-1, arXiv 2606.02373, Table 5)."""

    recipe: Literal["paper", "robust"] = "paper"
    """Source of the weights that a loaded configuration does not give: the defaults, or `RECIPES`."""
    outcome: float = 0.7
    beta: Annotated[float, Meta(gt=0.0)] = 2.0
    trajectory: float = 0.3
    answer_found: float = 1.0
    answer: float = 0.8
    trajectory_answer: float = 0.4
    answer_missed: float = 0.35
    recall_gap: float = 0.0
    clutter: float = 0.0
    """The cost of a full set of only irrelevant units."""
    diversity: float = 0.15
    diversity_target: Positive = 6
    diversity_shortfall: float = 0.0
    curation: float = 0.0
    curation_target: Share = 0.40
    turn_penalty: float = 0.02
    turn_penalty_from: Count = 20
    process_cap: Weight = 0.5
    """Limit on the absolute sum of diversity, its shortfall, curation and turns."""
    empty: float = -0.2
    format_failure: float = -0.5
    floor: float = 0.001


RECIPES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    msgspec.toml.decode(Path(__file__).with_name("recipes.toml").read_bytes(), type=dict[str, dict[str, float]])
)
"""The settings in which a recipe differs from the defaults."""


def with_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given `[reward]` settings on top of those of the recipe that they name."""
    recipe = given.get("recipe")
    return {**RECIPES.get(recipe, {}), **given} if isinstance(recipe, str) else dict(given)
