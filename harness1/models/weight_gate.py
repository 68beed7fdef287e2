"""Who may use a model's weights: calls share them, and a change of weights has them alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness1.errors import InfrastructureFault, UsageError


class WeightGate:
    """Lets calls in, and keeps them out while weights change, so that every output is of one version.

    A change waits until the calls in flight have ended; calls that come in the meantime wait for it. An event lives
    for one change only, so that a gate serves one event loop after another.
    """

    def __init__(self) -> None:
        self.version = 0
        """Of the weights in use."""
        self._calls = 0
        self._usable = True
        self._changed: asyncio.Event | None = None
        self._drained = asyncio.Event()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Use the weights.

        Raises:
            InfrastructureFault: the last change failed half-way: nobody knows what the weights are.
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
        """Change the weights; they have the version if nothing is raised. A `UsageError` says that the old ones stay;
        whatever else is raised leaves no weights to use."""
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
