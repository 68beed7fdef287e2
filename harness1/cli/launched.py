"""Commands that a launcher (`torchrun`, `accelerate launch`) starts once for each GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from harness1.engines.engine import follow, leading
from harness1.training.process_group import ProcessGroup, joined_group


def launched() -> ProcessGroup:
    """Return the place that the launcher gave this process, by its environment variables."""
    rank, size, local = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return ProcessGroup(int(rank or 0), int(size or 1), int(local or 0))


@contextmanager
def led_group(*, joins: bool = True) -> Iterator[ProcessGroup | None]:
    """Yield the group, in the process that leads it or is alone. The others follow until that one ends; they yield
    None, when nothing is left to do.

    Args:
        joins: False for work that joins its processes by itself: each yields its place, and a size of 1.
    """
    place = launched()
    with joined_group(place if joins else replace(place, size=1)) as group:
        if joins and not group.leads:
            follow(group)
            yield None
            return
        with leading(group):
            yield group
