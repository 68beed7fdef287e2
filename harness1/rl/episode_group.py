"""The unit of reinforcement learning: several episodes on one task."""

from __future__ import annotations

from harness1.records import Episode, Record


class EpisodeGroup(Record):
    """The finished episodes of a task, by `sample_idx`; their rewards are compared with each other alone."""

    index: int
    """Groups are numbered as they are begun, from 0."""
    version: int
    """The version of the weights when it was begun."""
    episodes: tuple[Episode, ...]
