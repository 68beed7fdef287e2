"""A gate between calls, which share a model's weights, and changes of weights, which need exclusive access."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness1.errors import InfrastructureFault, UsageError


class WeightGate:
    """A gate that holds calls back while weights change: every output is of one version.

    A change waits until the calls in flight have ended; calls that arrive meanwhile wait for it. Each change has its
    own event, so that a gate can serve one event loop after another.
    """

    def __init__(self) -> None:
        self.version = 0
        """Version of the weights in use."""
        self._calls = 0
        self._usable = True
        self._changed: asyncio.Event | None = None
        self._drained = asyncio.Event()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Use the weights.

        Raises:
            InfrastructureFault: the last change failed half-way, and the state of the weights is unknown.
        """
        while self._changed is not None:
            await self._changed.wait()
        if not self._usable:
            raise InfrastructureFault("the last change of weights failed; load them again")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._drained.set()

    @asynccontextmanager
    async def change(self, version: int) -> AsyncIterator[None]:
        """Change the weights, which have the new version if nothing is raised. After a `UsageError` the old ones stay
        in use; after any other error there are no usable weights."""
        while self._changed is not None:
            await self._changed.wait()
        changed = self._changed = asyncio.Event()
        try:
            self._drained = asyncio.Event()
            if self._calls:
                await self._drained.wait()
            usable, self._usable = self._usable, False
            try:
                yield
            except UsageError:
                self._usable = usable
                raise
            self.version, self._usable = version, True
        finally:
            self._changed = None
            changed.set()
