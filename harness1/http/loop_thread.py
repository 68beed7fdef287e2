"""An event loop in its own thread, for engines that belong to one loop, and for code that waits for requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from harness1.errors import InfrastructureFault

Result = TypeVar("Result")


class LoopThread:
    """An event loop in a thread of this name, which does not keep the process from exiting."""

    def __init__(self, name: str) -> None:
        self._loop, self._name = asyncio.new_event_loop(), name
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and await it, with cancellation; raise InfrastructureFault if it was stopped."""
        try:
            if not self._stopped:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
            work.close()
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        raise InfrastructureFault(f"{self._name} was closed")

    def stop(self) -> None:
        """Cancel all work and end the thread, once."""
        if self._stopped:
            return

        async def cancel_others() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._stopped = True
        self.call(cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
