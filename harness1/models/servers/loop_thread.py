"""An event loop in its own thread, for an engine that callers in several event loops share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from harness1.errors import InfrastructureFault

Result = TypeVar("Result")


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and block until it is done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and await it, with cancellation; raise InfrastructureFault if it was stopped."""
        if self._stopped:
            work.close()
            raise InfrastructureFault("vLLM was closed")
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            if self._stopped:
                raise InfrastructureFault("vLLM was closed") from None
            raise

    def stop(self) -> bool:
        """Cancel all work and end the thread; return False if it was already stopped."""
        if self._stopped:
            return False
        self._stopped = True
        self.call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
