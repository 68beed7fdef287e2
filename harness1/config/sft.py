"""`[sft]`: rows made of teachers' episodes. Defaults are the published recipe (Harness-1, arXiv 2606.02373,
appendix on training)."""

from __future__ import annotations

from typing import Literal

from harness1.hashing import digest
from harness1.settings import Count, Positive, Settings, Share


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
