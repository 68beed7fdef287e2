"""`[sft]`: training rows made of teachers' episodes. Defaults are the published recipe (Harness-1, arXiv 2606.02373,
appendix on training)."""

from __future__ import annotations

from typing import Literal

from harness1.hashing import digest
from harness1.settings import Count, Positive, Settings, Share


class Gates(Settings):
    """The conditions under which a teacher's episode is learned from."""

    recall: Share = 0.10
    """Least curated recall."""
    documents: Positive = 1
    """Fewest curated documents."""
    tools: Positive = 1
    """Fewest different tools that an episode must have used successfully."""
    tool_share: Share = 0.0
    """Tool-mix floor: least share of the kept episodes' turns for each offered tool, or the collection is refused."""
    near: Share = 0.8
    """Two queries count as the same if their word sets are at least this similar (Jaccard, estimated by MinHash)."""
    quotas: dict[str, Positive] = {}
    """Most episodes kept per dataset, by its name; of other datasets, all."""

    def __hash__(self) -> int:
        # A configuration is a key of caches, and a mapping is not hashable.
        return hash(digest(self))


class Sft(Settings):
    """The making of rows from episodes."""

    gates: Gates = Gates()
    rows: Literal["turn", "epoch"] = "turn"
    """One row per turn, or one per chain of turns whose prompts are proven prefixes of each other."""
    max_tokens: Positive = 32768
    """Longer rows are dropped and counted."""
    repeated_weight: Share = 1.0
    """Weight of a turn that uses the same tool as both turns before it; 1: like any other."""
    held_out: Share = 0.05
    """Share of the tasks that is used for validation and never trained on."""
    seed: Count = 42
