"""Concurrent callers share batches without noticing, and never wait in vain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from harness1.retrieval import sharing as batching
from harness1.retrieval.sharing import Batcher

LONG = 30.0


class Work:
    """Doubles numbers, one batch at a time; remembers batches and threads. A closed gate holds the next batch up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.threads.add(threading.get_ident())
        self.begun.set()
        assert self.gate.wait(10)
        if -1 in items:
            raise KeyError("minus one")
        return [2 * item for item in items]


async def begun(work: Work) -> None:
    while not work.begun.is_set():
        await asyncio.sleep(0.001)


def test_concurrent_calls_make_up_one_batch_and_each_gets_its_own_results_in_order() -> None:
    work = Work()
    batcher = Batcher(work, LONG, 6)

    async def callers() -> list[list[int]]:
        return await asyncio.gather(batcher.submit([3, 1]), batcher.submit([]), batcher.submit([2]), *three())

    def three() -> list[object]:
        return [batcher.submit([number]) for number in (7, 8, 9)]

    assert asyncio.run(callers()) == [[6, 2], [], [4], [14], [16], [18]]
    assert work.batches == [[3, 1, 2, 7, 8, 9]]


def test_the_window_closes_on_a_batch_that_is_not_full() -> None:
    work = Work()
    started = time.monotonic()
    assert asyncio.run(Batcher(work, 0.05, 64).submit([1])) == [2]
    assert 0.05 <= time.monotonic() - started < 5


def test_a_call_of_more_than_a_batch_is_split_and_comes_back_whole() -> None:
    work = Work()
    assert asyncio.run(Batcher(work, LONG, 4).submit(range(10))) == [2 * number for number in range(10)]
    assert [len(batch) for batch in work.batches] == [4, 4, 2]


def test_what_comes_while_a_batch_is_at_work_is_the_next_batch_and_waits_no_longer() -> None:
    work = Work()
    batcher = Batcher(work, LONG, 2)

    async def callers() -> None:
        work.gate.clear()
        first = asyncio.gather(batcher.submit([1]), batcher.submit([2]))
        await begun(work)
        second = asyncio.create_task(batcher.submit([3]))
        ticks = 0
        while ticks < 5:  # the loop goes on
            await asyncio.sleep(0.001)
            ticks += 1
        work.gate.set()
        assert await asyncio.wait_for(first, 5) == [[2], [4]]
        assert await asyncio.wait_for(second, 5) == [6]

    asyncio.run(callers())
    assert work.batches == [[1, 2], [3]]
    assert len(work.threads) == 1
    assert threading.get_ident() not in work.threads


def test_a_lone_caller_waits_for_nobody_once_he_was_alone() -> None:
    batcher = Batcher(Work(), 0.2, 64)

    async def calls() -> float:
        await batcher.submit([1])
        started = time.monotonic()
        for number in range(10):
            assert await batcher.submit([number]) == [2 * number]
        return time.monotonic() - started

    assert asyncio.run(calls()) < 0.2


def test_an_exception_reaches_the_callers_of_its_batch_alone() -> None:
    work = Work()
    batcher = Batcher(work, LONG, 2)

    async def callers() -> list[object]:
        calls = [batcher.submit([number]) for number in (-1, 5, 6, 7)]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second, *others = asyncio.run(callers())
    assert isinstance(first, KeyError)
    assert isinstance(second, KeyError)
    assert others == [[12], [14]]


def test_a_missing_result_is_an_error_and_no_shift() -> None:
    with pytest.raises(ValueError, match="1 results for 2 items"):
        asyncio.run(Batcher(lambda items: items[:1], 0.0, 2).submit([1, 2]))


def test_a_cancelled_caller_disturbs_nobody_and_his_items_are_withdrawn() -> None:
    work = Work()
    batcher = Batcher(work, LONG, 1)

    async def callers() -> None:
        work.gate.clear()
        at_work = asyncio.create_task(batcher.submit([1]))
        await begun(work)
        waiting, third = (asyncio.create_task(batcher.submit([number])) for number in (2, 3))
        await asyncio.sleep(0)
        at_work.cancel()
        waiting.cancel()
        await asyncio.sleep(0)
        work.gate.set()
        assert await asyncio.wait_for(third, 5) == [6]
        assert at_work.cancelled()
        assert waiting.cancelled()

    asyncio.run(callers())
    assert work.batches == [[1], [3]]


def test_what_is_withdrawn_is_let_go_while_a_batch_is_still_at_work() -> None:
    work = Work()
    batcher = Batcher(work, LONG, 1)

    async def callers() -> None:
        work.gate.clear()
        at_work = asyncio.create_task(batcher.submit([1]))
        await begun(work)
        kept, *leaving = (asyncio.create_task(batcher.submit([number, number])) for number in range(2, 12))
        await asyncio.sleep(0)
        for each in leaving:
            each.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert len(batcher._waiting) == 2
        work.gate.set()
        assert await asyncio.wait_for(asyncio.gather(at_work, kept), 5) == [[2], [4, 4]]

    asyncio.run(callers())


def test_one_batcher_serves_one_event_loop_after_another_and_several_at_once() -> None:
    batcher = Batcher(Work(), 0.001, 8)

    async def cut_short() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher.submit([1]), 0)

    for number in range(5):
        asyncio.run(cut_short())
        assert asyncio.run(batcher.submit([number])) == [2 * number]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: asyncio.run(batcher.submit([n])) or []})) for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {n: [2 * n] for n in range(6)}


def test_the_thread_ends_without_work_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "IDLE_S", 0.01)
    batcher = Batcher(Work(), 0.0, 8)
    before = set(threading.enumerate())
    assert asyncio.run(batcher.submit([1])) == [2]
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
    assert asyncio.run(batcher.submit([2])) == [4]


def test_a_process_exits_while_a_batch_is_at_work() -> None:
    code = """if True:
        import asyncio, time
        from harness1.retrieval import sharing as batching
        batching.CLOSING_S = 0.2
        batcher = batching.Batcher(lambda items: time.sleep(60), 0.0, 1)
        async def main():
            asyncio.ensure_future(batcher.submit([1]))
            await asyncio.sleep(0.05)
        asyncio.run(main())
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
