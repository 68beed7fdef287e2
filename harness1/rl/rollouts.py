"""Define groups of episodes, and the interface that plays them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from harness1.episodes.jobs import Jobs, OnEpisode
from harness1.records import Episode, Record

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


class EpisodeGroup(Record):
    """The finished episodes of one task, ordered by `sample_idx`; their rewards are compared only with each other."""

    index: int
    """The number of the group, from 0, in the order in which groups are begun."""
    version: int
    """The version of the weights when the group was begun."""
    episodes: tuple[Episode, ...]


class Rollouts(Protocol):
    """Plays episodes with the weights published last. Several calls of `run` may be in progress at once."""

    async def run(self, jobs: Jobs, on_episode: OnEpisode) -> None:
        """Play all jobs. `on_episode` is called in the event loop, with episodes that are scored or that the
        infrastructure broke (`Status.INFRA_ERROR`).

        Raises:
            HarnessError: any error but a fault of the infrastructure.
        """
        ...

    async def publish(self, state: Weights, version: int) -> None:
        """Switch to new weights: calls in flight end with the old ones; later calls are sampled with the new ones and
        recorded under `version`. The weights must not change until this returns.

        Args:
            state: the adapters on the model that training began with, or without them its whole state dictionary.

        Raises:
            InfrastructureFault: the weights could not be delivered.
        """
        ...
