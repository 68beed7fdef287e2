"""Run asynchronous code in virtual time: a sleep takes none, and a wait that nothing would end is an error."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


class VirtualSelector(selectors.DefaultSelector):
    """Where a loop would sleep until its next timer, this moves its clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing is left to wait for: the code hangs"
            self.now += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = VirtualSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def run(work: Coroutine[Any, Any, Value]) -> Value:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
