"""`[sft]`: training rows made from teachers' episodes. Defaults are the published recipe (Harness-1, arXiv 2606.02373,
appendix on training)."""

from __future__ import annotations

from typing import Literal

from harness1.hashing import digest
from harness1.settings import Count, Positive, Settings, Share


class Gates(Settings):
    """The conditions that a teacher's episode must meet to be trained on."""

    recall: Share = 0.10
    """Minimum curated recall."""
    precision: Share = 0.0
    """Minimum curated precision: a student that learns only from small sets delivers little else."""
    documents: Positive = 1
    """Minimum number of curated documents."""
    tools: Positive = 1
    """Minimum number of different tools that an episode must have used successfully."""
    tool_share: Share = 0.0
    """Tool-mix floor: a collection is refused if an offered tool has a smaller share of the kept episodes' turns."""
    near: Share = 0.8
    """Two episodes are duplicates if the word sets of their queries are at least this similar (Jaccard, estimated by
    MinHash)."""
    per_task: Count = 0
    """Maximum number of episodes kept of one task, the best first: highest recall, then fewest turns; 0: all."""
    same_searches: Share = 1.0
    """Largest share of the kept episodes that searched equally often; the others are dropped by lot; 1: any. A student
    that decodes greedily never does what most episodes leave out."""
    quotas: dict[str, Positive] = {}
    """Maximum number of episodes kept, by dataset name; of other datasets, all are kept."""

    def __hash__(self) -> int:
        # A configuration is a key of caches, and a mapping is not hashable.
        return hash(digest(self))


class Sft(Settings):
    """Settings for making rows from episodes."""

    gates: Gates = Gates()
    rows: Literal["turn", "epoch"] = "turn"
    """One row per turn, or one per chain of turns whose prompts are proven prefixes of each other."""
    max_tokens: Positive = 32768
    """Longer rows are dropped and counted."""
    repeated_weight: Share = 1.0
    """Weight of a turn that uses the same tool as both turns before it; 1: like any other."""
    useless_weight: Share = 1.0
    """Weight of a search that brought no gold document that was new; 1: like any other. With 0, a student learns from a
    teacher that tries several searches only those that turned out to be right."""
    held_out: Share = 0.05
    """Share of the tasks that is used for validation and never trained on."""
    seed: Count = 42
    """Seed that draws the held-out tasks and the episodes that fill a quota."""
