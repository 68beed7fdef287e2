"""The unit of reinforcement learning: several episodes on one task."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from harness1.episodes.jobs import EpisodeJob
from harness1.records import Episode, Record

if TYPE_CHECKING:
    from torch import Tensor


class EpisodeGroup(Record):
    """The finished episodes of a task, by `sample_idx`; their rewards are compared with each other alone."""

    index: int
    """Groups are numbered as they are begun, from 0."""
    version: int
    """The version of the weights when it was begun."""
    episodes: tuple[Episode, ...]


class Rollouts(Protocol):
    """Plays episodes with the weights that were published last. Implementations serve several `run` at a time."""

    async def run(
        self, jobs: Iterable[EpisodeJob] | AsyncIterable[EpisodeJob], on_episode: Callable[[Episode], None]
    ) -> None:
        """Play all jobs; a job is taken from the source when there is room for it. `on_episode` is called once for
        each, in no fixed order, in the event loop: scored episodes, and those that the infrastructure broke
        (`Status.INFRA_ERROR`).

        Raises:
            HarnessError: what is nobody's fault but the user's or ours.
        """
        ...

    async def publish(self, state: Mapping[str, Tensor], version: int) -> None:
        """Go on with other weights: calls in flight end with the old ones, later calls are sampled by the new, and are
        recorded under `version`. Until this returns the weights must not change.

        Args:
            state: the state dictionary of the plain model, without adapters.

        Raises:
            InfrastructureFault: the weights did not arrive.
        """
        ...
