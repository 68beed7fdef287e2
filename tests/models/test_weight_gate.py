"""Calls share the weights; a change has them alone."""

from __future__ import annotations

import asyncio

import pytest

from harness1.errors import InfrastructureFault, UsageError
from harness1.models.token_server import WeightGate
from tests.support import run


class Uses:
    """Tasks that use or change weights until they are let go, and the order in which they began and ended."""

    def __init__(self) -> None:
        self.gate, self.order = WeightGate(), list[str]()
        self.free = asyncio.Event()

    async def call(self, name: str) -> None:
        async with self.gate.call():
            self.order.append(name)
            await self.free.wait()
            self.order.append(f"/{name}")

    async def change(self, version: int) -> None:
        async with self.gate.change(version):
            self.order.append(f"v{version}")
            await asyncio.sleep(0)
            self.order.append(f"/v{version}")


def test_a_change_waits_for_the_calls_in_flight_and_later_calls_for_the_change() -> None:
    uses = Uses()

    async def work() -> None:
        tasks = [asyncio.create_task(each) for each in (uses.call("a"), uses.call("b"), uses.change(1), uses.call("c"))]
        await asyncio.sleep(0.01)
        assert uses.order == ["a", "b"]
        uses.free.set()
        await asyncio.gather(*tasks)

    run(work())
    assert uses.order == ["a", "b", "/a", "/b", "v1", "/v1", "c", "/c"]
    assert uses.gate.version == 1


def test_changes_come_one_after_another() -> None:
    uses = Uses()

    async def work() -> None:
        await asyncio.gather(uses.change(1), uses.change(2), uses.change(3))

    run(work())
    assert uses.order == ["v1", "/v1", "v2", "/v2", "v3", "/v3"]


def test_a_change_that_is_cancelled_while_it_waits_lets_calls_in() -> None:
    uses = Uses()

    async def work() -> None:
        call = asyncio.create_task(uses.call("a"))
        await asyncio.sleep(0)
        change = asyncio.create_task(uses.change(1))
        await asyncio.sleep(0)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
        uses.free.set()
        await uses.call("b")
        await call

    run(work())
    assert uses.gate.version == 0
    assert "b" in uses.order


def test_a_call_that_is_cancelled_gives_its_place_up() -> None:
    uses = Uses()

    async def work() -> None:
        call = asyncio.create_task(uses.call("a"))
        await asyncio.sleep(0)
        change = asyncio.create_task(uses.change(1))
        call.cancel()
        await asyncio.wait_for(change, 5)

    run(work())
    assert uses.gate.version == 1


@pytest.mark.parametrize(("error", "usable"), [(UsageError("no such folder"), True), (OSError("disk"), False)])
def test_only_a_refused_change_leaves_the_old_weights_in_use(error: Exception, usable: bool) -> None:
    gate = WeightGate()

    async def work() -> None:
        with pytest.raises(type(error)):
            async with gate.change(1):
                raise error
        assert gate.version == 0
        if usable:
            async with gate.call():
                return
        with pytest.raises(InfrastructureFault):
            async with gate.call():
                pass
        async with gate.change(2):
            pass
        async with gate.call():
            assert gate.version == 2

    run(work())


def test_a_gate_serves_one_event_loop_after_another() -> None:
    uses = Uses()

    async def work(version: int) -> None:
        uses.free = asyncio.Event()
        call = asyncio.create_task(uses.call("a"))
        await asyncio.sleep(0)
        change, late = asyncio.create_task(uses.change(version)), asyncio.create_task(uses.call("b"))
        await asyncio.sleep(0)
        uses.free.set()
        await asyncio.gather(call, change, late)

    for version in (1, 2):
        run(work(version))
    assert uses.gate.version == 2
