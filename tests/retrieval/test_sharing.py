"""Concurrent callers share batches without noticing, and never wait in vain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness1.records import ChunkId
from harness1.retrieval import sharing
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from harness1.retrieval.sharing import ORDINARY, Batcher, CachingRetriever
from tests.support import CORPUS, WordRetriever, chunk

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
        return await asyncio.gather(*map(batcher.submit, ([3, 1], [], [2], [7], [8], [9])))

    assert asyncio.run(callers()) == [[6, 2], [], [4], [14], [16], [18]]
    assert work.batches == [[3, 1, 2, 7, 8, 9]]
    assert asyncio.run(Batcher(work, LONG, 4).submit(range(10))) == [2 * number for number in range(10)]
    assert [len(batch) for batch in work.batches] == [6, 4, 4, 2], "a long call is split, and comes back whole"


def test_a_long_call_neither_delays_nor_fails_a_short_one_and_ends_when_it_is_cancelled() -> None:
    work = Work()
    batcher = Batcher(work, 0.0, 4)

    async def callers() -> None:
        work.gate.clear()
        short, long = (asyncio.create_task(batcher.submit(items)) for items in ([1], [2, 3, 4, 5, 6, 7, -1]))
        await begun(work)
        work.gate.set()
        assert await short == [2]
        with pytest.raises(KeyError):
            await long
        work.begun.clear()
        work.gate.clear()
        long = asyncio.create_task(batcher.submit(range(40)))
        await begun(work)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        work.gate.set()
        assert await batcher.submit([8]) == [16]

    asyncio.run(callers())
    assert work.batches[-2:] == [[0, 1, 2, 3], [8]]


def test_a_lone_caller_waits_for_others_once_and_not_again() -> None:
    batcher = Batcher(Work(), 0.2, 64)

    async def calls() -> tuple[float, float]:
        started = time.monotonic()
        await batcher.submit([1])
        first = time.monotonic()
        for number in range(10):
            assert await batcher.submit([number]) == [2 * number]
        return first - started, time.monotonic() - first

    first, others = asyncio.run(calls())
    assert 0.2 <= first < 5
    assert others < 0.2


def test_what_comes_while_a_batch_is_at_work_is_the_next_batch_and_waits_no_longer() -> None:
    work = Work()
    batcher = Batcher(work, LONG, 2)

    async def callers() -> None:
        work.gate.clear()
        first = asyncio.gather(batcher.submit([1]), batcher.submit([2]))
        await begun(work)
        second = asyncio.create_task(batcher.submit([3]))
        await asyncio.sleep(0.005)  # the loop goes on
        work.gate.set()
        assert await asyncio.wait_for(first, 5) == [[2], [4]]
        assert await asyncio.wait_for(second, 5) == [6]

    asyncio.run(callers())
    assert work.batches == [[1, 2], [3]]
    assert len(work.threads) == 1
    assert threading.get_ident() not in work.threads


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
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(batcher._waiting) == 1, "what is withdrawn is let go while a batch is at work"
        work.gate.set()
        assert await asyncio.wait_for(third, 5) == [6]
        assert at_work.cancelled()
        assert waiting.cancelled()

    asyncio.run(callers())
    assert work.batches == [[1], [3]]


def test_one_batcher_serves_one_event_loop_after_another_and_several_at_once() -> None:
    batcher = Batcher(Work(), 0.001, 8)

    async def cut_short() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher.submit([1]), 0)

    for number in range(5):
        asyncio.run(cut_short())
        assert asyncio.run(batcher.submit([number])) == [2 * number]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda number: asyncio.run(batcher.submit([number])), range(6), timeout=10))
    assert found == [[2 * number] for number in range(6)]


def test_the_thread_ends_without_work_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "IDLE_S", 0.01)
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


ADA = SearchRequest("Ada", 5)


class Slow(WordRetriever):
    """Takes `delay` seconds for a search, gives up at its deadline, lingers when cancelled; `faults` searches fail."""

    def __init__(self, delay: float = 0.02, faults: int = 0) -> None:
        super().__init__(CORPUS, faults=faults)
        self.delay = delay
        self.asked: list[list[str]] = []
        self.cancelled: list[list[str]] = []

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        self.asked.append([request.query for request in requests])
        deadline = min(request.deadline for request in requests)
        try:
            await asyncio.sleep(min(self.delay, deadline))
        except asyncio.CancelledError:
            self.cancelled.append(self.asked[-1])
            await asyncio.sleep(0.05)
            raise
        if deadline < self.delay:
            return [RetrievalFault("too late") for _ in requests]
        return await super().search(requests)


def cached(inner: WordRetriever | None = None, size: int = 100) -> CachingRetriever:
    return CachingRetriever(inner or Slow(), size, "settings")


def ask(retriever: CachingRetriever, *requests: SearchRequest) -> list[SearchResult | RetrievalFault]:
    return asyncio.run(retriever.search(requests))


async def siblings(retriever: CachingRetriever, count: int) -> list[list[SearchResult | RetrievalFault]]:
    return await asyncio.gather(*(retriever.search([ADA]) for _ in range(count)))


def test_an_equal_search_is_answered_from_memory_with_the_same_objects() -> None:
    inner = Slow()
    retriever = cached(inner)
    first, again = ask(retriever, ADA), ask(retriever, SearchRequest("Ada", 5, deadline=1.0))
    assert first == asyncio.run(WordRetriever(CORPUS).search([ADA]))
    assert isinstance(first[0], SearchResult)
    assert first[0].hits
    assert again[0] is first[0]
    assert inner.asked == [["Ada"]]


def test_query_k_exclusions_and_settings_make_a_search() -> None:
    ids = [made.chunk_id for made in CORPUS]
    odd = SearchRequest("Ada\ud800", 5, frozenset([ChunkId("\udfff")]))
    excluding = [SearchRequest("Ada", 5, frozenset([made])) for made in ids[:2]]
    different = [ADA, SearchRequest("ada", 5), SearchRequest("Ada", 4), *excluding, odd]
    different.append(SearchRequest("Ada", 5, about="Byron"))
    inner = Slow()
    retriever = cached(inner)
    assert ask(retriever, *different) == asyncio.run(WordRetriever(CORPUS).search(different))
    assert [len(asked) for asked in inner.asked] == [7]
    ask(retriever, SearchRequest("Ada", 5, frozenset(ids)), SearchRequest("Ada", 5, frozenset(ids[::-1])))
    assert [len(asked) for asked in inner.asked] == [7, 1]
    assert retriever._key(ADA) != CachingRetriever(Slow(), 9, "other settings")._key(ADA)


def test_known_and_new_searches_of_one_call_keep_their_order_and_new_ones_go_together() -> None:
    inner = Slow()
    retriever = cached(inner)
    ask(retriever, ADA)
    requests = [SearchRequest(query, 5) for query in ("Byron", "Ada", "town", "Byron")]
    assert ask(retriever, *requests) == asyncio.run(WordRetriever(CORPUS).search(requests))
    assert inner.asked == [["Ada"], ["Byron", "town"]]


def test_equal_searches_under_way_are_one() -> None:
    inner = Slow()
    retriever = cached(inner)

    found = asyncio.run(siblings(retriever, 8))
    assert all(result[0] is found[0][0] for result in found)
    assert inner.asked == [["Ada"]]


def test_a_fault_is_not_kept_and_not_shared() -> None:
    inner = Slow(faults=2)
    retriever = cached(inner)

    kinds = [type(result[0]) for result in asyncio.run(siblings(retriever, 4))]
    assert kinds == [RetrievalFault, RetrievalFault, SearchResult, SearchResult]
    assert len(inner.asked) == 3
    inner = Slow(faults=2)
    requests = [SearchRequest(query, 5) for query in ("Ada", "Byron", "town")]
    assert [type(found) for found in ask(cached(inner), *requests)] == [RetrievalFault, RetrievalFault, SearchResult]
    assert inner.asked == [["Ada", "Byron", "town"]], "one's own is not asked again"


def test_every_caller_of_a_failing_retriever_gets_a_fault_however_many_they_are() -> None:
    retriever = cached(Slow(delay=0.0, faults=150))
    assert {type(result[0]) for result in asyncio.run(siblings(retriever, 150))} == {RetrievalFault}


def test_a_search_is_cancelled_with_the_last_who_waits_for_it_and_can_be_asked_anew() -> None:
    inner = Slow(delay=10.0)
    retriever = cached(inner)

    async def siblings() -> list[SearchResult | RetrievalFault]:
        callers = [asyncio.create_task(retriever.search([ADA])) for _ in range(3)]
        await asyncio.sleep(0.01)
        for caller in callers:
            assert inner.cancelled == []
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
        inner.delay = 0.02
        return [(await retriever.search([ADA]))[0], (await retriever.search([ADA]))[0]]

    first, kept = asyncio.run(siblings())
    assert isinstance(first, SearchResult)
    assert kept is first
    assert inner.cancelled == [["Ada"]]
    assert inner.asked == [["Ada"], ["Ada"]]


def test_a_call_holds_all_its_searches_while_it_waits_for_the_first() -> None:
    inner = Slow(delay=0.1)
    retriever = cached(inner)

    async def callers() -> list[SearchResult | RetrievalFault]:
        first, second = (asyncio.create_task(retriever.search([SearchRequest(q, 5)])) for q in ("Ada", "Byron"))
        await asyncio.sleep(0)
        both = asyncio.create_task(retriever.search([ADA, SearchRequest("Byron", 5)]))
        await asyncio.sleep(0.01)
        for each in (first, second):
            each.cancel()
        return await both

    assert [type(found) for found in asyncio.run(callers())] == [SearchResult, SearchResult]
    assert inner.asked == [["Ada"], ["Byron"]]


@pytest.mark.parametrize("order", [1, -1])
def test_everyone_has_his_own_deadline(order: int) -> None:
    retriever = cached(Slow(delay=0.1))

    async def both() -> list[list[SearchResult | RetrievalFault]]:
        requests = [ADA, SearchRequest("Ada", 5, deadline=0.01)][::order]
        return await asyncio.gather(*(retriever.search([request]) for request in requests))

    patient, hurried = asyncio.run(both())[::order]
    assert isinstance(patient[0], SearchResult)
    assert isinstance(hurried[0], RetrievalFault)


def test_the_result_unused_for_longest_goes_first() -> None:
    inner = Slow(delay=0.0)
    retriever = cached(inner, size=2)
    for query in ("Ada", "Byron", "Ada", "town", "Ada", "Byron"):
        ask(retriever, SearchRequest(query, 5))
    assert inner.asked == [["Ada"], ["Byron"], ["town"], ["Byron"]]


@pytest.mark.parametrize(
    ("size", "asked", "kept"),
    [
        (4, (ORDINARY, 1, 2, 3, 4), [1, 2, 3, 4]),
        (4, (44, 18, 2), [44, 18, 2]),
        (4, (44, 18, 3), [18, 3]),
        (4, (5, 64, 6), [6]),
    ],
)
def test_long_results_are_kept_in_the_place_of_several(size: int, asked: tuple[int, ...], kept: list[int]) -> None:
    retriever = cached(WordRetriever([chunk(f"doc{n}", "many") for n in range(max(asked))]), size)
    for k in asked:
        ask(retriever, SearchRequest("many", k))
    assert [len(result.hits) for result in retriever._kept.results.values()] == kept


def test_a_search_that_a_closed_event_loop_left_behind_is_asked_anew() -> None:
    inner = Slow(delay=10.0)
    retriever = cached(inner)
    loop = asyncio.new_event_loop()
    task = loop.create_task(retriever.search([ADA]))
    loop.run_until_complete(asyncio.sleep(0.001))
    left = asyncio.all_tasks(loop)
    inner.delay = 0.0
    assert isinstance(ask(retriever, ADA)[0], SearchResult)
    for each in left:
        each.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()
    assert task.cancelled()
    assert retriever._flights == {}


class Broken(Slow):
    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        if self.faults:
            raise OSError("gone")
        return []


def test_what_the_retriever_raises_or_leaves_out_is_passed_on() -> None:
    with pytest.raises(OSError, match="gone"):
        ask(cached(Broken(faults=1)), ADA)
    assert ask(cached(Broken()), ADA) == [RetrievalFault("0 results for 1 queries")]
