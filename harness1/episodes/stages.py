"""Carry jobs through stages, each with its own bound, so that a slow stage does not hold the slots of another.

    INIT -> READY -> RUN -> (waiting) -> POST -> on_result

A job holds the slot of its stage until the next one has room for it. So every bound always holds, and a slow consumer
slows down, stage by stage, the source of jobs. (The stages are those of POLAR's dispatcher, arXiv 2605.24220, and
SkyRL-Agent's, arXiv 2511.16108; bounded queues and the handling of failures are our own.)
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args

from harness1.errors import ConfigError, HarnessError
from harness1.records import Record

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Ran = TypeVar("Ran")
Result = TypeVar("Result")
Value = TypeVar("Value")
StageName = Literal["init", "ready", "run", "post_wait", "post"]
"""`ready` and `post_wait` are waits for a slot, the others are work."""
Cut = Literal["deadline", "cancelled"]


class StageLimits(Record):
    """Bounds of the stages in jobs, and deadlines of their work in seconds, waits excluded (None: no deadline)."""

    init: int = 8
    """In INIT. A prepared job that READY has no room for stays here."""
    ready: int = 8
    """Prepared, and waiting for a slot of RUN."""
    run: int = 8
    post: int = 8
    """In POST; as many may wait for it."""
    init_s: float | None = None
    run_s: float | None = None
    post_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.init, self.ready, self.run, self.post) < 1:
            raise ConfigError("every stage needs room for at least one job")

    @classmethod
    def equal(cls, places: int) -> StageLimits:
        """Give every stage the same bound, and no deadlines."""
        return cls(init=places, ready=places, run=places, post=places)


@dataclass(frozen=True)
class Finished(Generic[Result]):
    """The outcome of a job that passed all stages; with `cut`, RUN was ended early and POST got what it had kept."""

    result: Result
    ms: dict[StageName, float]
    """Milliseconds in each stage."""
    cut: Cut | None = None


@dataclass(frozen=True)
class StageFailure:
    """The outcome of a job that ended in a stage: it raised, passed its deadline, or was cancelled."""

    stage: StageName
    kind: Literal["fault", "deadline", "cancelled"]
    error: str
    ms: dict[StageName, float]
    """Milliseconds in each stage that it entered."""
    cause: BaseException | None = None
    """The exception that the stage raised."""

    @property
    def exception(self) -> BaseException:
        """The exception for a caller that accepts no failures."""
        return self.cause or HarnessError(self.error)


class Pipeline(Generic[Item, Prepared, Ran, Result]):
    """Carries the jobs of one source through `init(job)`, `run(prepared, keep)` and `post(ran)`.

    A stage that raises ends its job and nothing else. `run` may call `keep` with the value that it would return if it
    had to end now: a job that is cancelled or passes its deadline in RUN enters POST with the value kept last, or fails
    if there is none. A stage is ended by cancelling it; one that ignores that is waited for.
    """

    def __init__(
        self,
        limits: StageLimits,
        init: Callable[[Item], Awaitable[Prepared]],
        run: Callable[[Prepared, Callable[[Ran], None]], Awaitable[Ran]],
        post: Callable[[Ran], Awaitable[Result]],
        on_result: Callable[[Item, Finished[Result] | StageFailure], Awaitable[None] | None],
    ) -> None:
        self._limits, self._stages, self._on_result = limits, (init, run, post), on_result
        bounds = (limits.init, limits.ready, limits.run, limits.post, limits.post)
        self._init, self._ready, self._run, self._post_wait, self._post = map(asyncio.Semaphore, bounds)
        self._live: set[_Live[Item, Ran]] = set()
        self._carriers: set[asyncio.Task[None]] = set()
        self._feeding: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._busy_ms = 0.0

    async def process(self, jobs: Iterable[Item] | AsyncIterable[Item]) -> float:
        """Carry all jobs to their end, and return the share of the RUN slots' time that was spent in `run`.

        A job is taken from the source when INIT has room for it. `on_result` is called once for each job, while the job
        holds its last slot: an awaitable that it returns is awaited, and slows the stages down. Cancelling this cancels
        all stages; jobs that had passed them are still handed over, the others get no result.

        Raises:
            Exception: from the source, after the jobs taken from it have ended; or from `on_result`, and all jobs at
                work are cancelled.
        """
        if self._feeding:
            raise RuntimeError("a pipeline takes one source of jobs; make another for the next")
        began = _now()
        self._feeding = asyncio.create_task(self._feed(jobs))
        try:
            await asyncio.wait({self._feeding})
            while self._carriers:
                await asyncio.wait(self._carriers)
        finally:
            self._stop()
            await asyncio.wait({self._feeding, *self._carriers})
        if self._error is not None:
            raise self._error
        await self._feeding
        wall = _now() - began
        return self._busy_ms / 1000 / self._limits.run / max(wall, 1e-9)

    @property
    def depths(self) -> dict[str, int]:
        """The number of jobs in each stage at this moment. Any thread may ask."""
        counts = Counter(live.stage for live in self._live.copy())
        return {stage: counts[stage] for stage in get_args(StageName)}

    def cancel(self, which: Callable[[Item], bool]) -> int:
        """Cancel the jobs that `which` selects, and return their number; a job being handed over is done."""
        chosen = [live for live in self._live if not live.through and which(live.job)]
        for live in chosen:
            live.cancel()
        return len(chosen)

    async def _feed(self, jobs: Iterable[Item] | AsyncIterable[Item]) -> None:
        async with aclosing(_each(jobs)) as source:
            await self._init.acquire()
            async for job in source:
                live = _Live[Item, Ran](job, self._init)
                carrier = asyncio.create_task(self._carry(live))
                self._live.add(live)
                self._carriers.add(carrier)
                carrier.add_done_callback(self._carried)
                await self._init.acquire()

    def _carried(self, carrier: asyncio.Task[None]) -> None:
        self._carriers.discard(carrier)
        if not carrier.cancelled() and (error := carrier.exception()):
            self._error = self._error or error
            self._stop()

    def _stop(self) -> None:
        """Cancel the source and the stages. Carriers go on: they free their slots and hand over what is finished."""
        self._stopping = True
        if self._feeding:
            self._feeding.cancel()
        self.cancel(lambda job: True)

    async def _carry(self, live: _Live[Item, Ran]) -> None:
        """Carry one job from its INIT slot to its result."""
        outcome: Finished[Result] | StageFailure
        try:
            outcome = await self._staged(live)
        except _Ended as end:
            outcome = StageFailure(end.stage, end.kind, str(end), live.ms, end.__cause__)
        live.through = True
        self._busy_ms += live.ms.get("run", 0.0)
        try:
            if isinstance(outcome, Finished) or not self._stopping:
                handed = self._on_result(live.job, outcome)
                if inspect.isawaitable(handed):
                    await handed
        finally:
            self._live.discard(live)
            if live.slot:
                live.slot.release()

    async def _staged(self, live: _Live[Item, Ran]) -> Finished[Result]:
        limits, (init, run, post) = self._limits, self._stages
        prepared: Prepared = await self._work(live, "init", limits.init_s, init, live.job)
        await self._move(live, "ready", self._ready)
        await self._move(live, "ready", self._run)
        cut: Cut | None = None
        try:
            ran: Ran = await self._work(live, "run", limits.run_s, run, prepared, live.keep)
        except _Ended as end:
            if end.kind == "fault" or not live.kept:
                raise
            ran, cut = live.kept[0], end.kind
        live.cancelled = False  # the cancellation ended RUN alone; POST may be cancelled again
        await self._move(live, "post_wait", self._post_wait)
        await self._move(live, "post_wait", self._post)
        return Finished(await self._work(live, "post", limits.post_s, post, ran), live.ms, cut)

    async def _work(
        self,
        live: _Live[Item, Ran],
        stage: StageName,
        deadline: float | None,
        function: Callable[..., Awaitable[Value]],
        *arguments: Any,
    ) -> Value:
        """Await a function as a task of its own, which can be cancelled, and turn its exception into `_Ended`."""
        if live.cancelled or self._stopping:  # in the moment the previous step ended
            raise _Ended(stage, "cancelled", "it was cancelled")
        live.stage, began = stage, _now()
        task = asyncio.create_task(_awaited(function, *arguments))
        live.task = task
        _, late = await asyncio.wait({task}, timeout=deadline)
        if late:
            task.cancel()
            await asyncio.wait(late)
        live.task = None
        live.ms[stage] = live.ms.get(stage, 0.0) + (_now() - began) * 1000
        error = asyncio.CancelledError("from within") if task.cancelled() else task.exception()
        if error is None:
            return task.result()
        # An exception of a cancelled stage is not its fault.
        if live.cancelled:
            raise _Ended(stage, "cancelled", "it was cancelled") from error
        if late:
            raise _Ended(stage, "deadline", f"it took longer than {deadline:g} s") from error
        raise _Ended(stage, "fault", f"{type(error).__name__}: {error}") from error

    async def _move(self, live: _Live[Item, Ran], stage: StageName, slot: asyncio.Semaphore) -> None:
        """Wait for a slot of the next stage, and then free the one that the job holds."""
        await self._work(live, stage, None, slot.acquire)
        if live.slot:
            live.slot.release()
        live.slot = slot


@dataclass(eq=False)
class _Live(Generic[Item, Ran]):
    """A job on its way: the slot that it holds, and the task that it awaits."""

    job: Item
    slot: asyncio.Semaphore | None
    stage: StageName = "init"
    task: asyncio.Task[Any] | None = None
    cancelled: bool = False
    through: bool = False
    kept: tuple[Ran, ...] = ()
    ms: dict[StageName, float] = field(default_factory=dict)

    def keep(self, ran: Ran) -> None:
        self.kept = (ran,)

    def cancel(self) -> None:
        self.cancelled = True
        if self.task:
            self.task.cancel()


class _Ended(Exception):
    """Ends a job in a stage."""

    def __init__(self, stage: StageName, kind: Literal["fault", "deadline", "cancelled"], message: str) -> None:
        super().__init__(message)
        self.stage, self.kind = stage, kind


async def unchanged(value: Value) -> Value:
    """Return the value: a stage with nothing to do."""
    return value


def results_to(on_result: Callable[[Result], None]) -> Callable[[Any, Finished[Result] | StageFailure], None]:
    """Return an `on_result` of a pipeline that passes results on and raises the first failure."""

    def hand_over(_job: Any, outcome: Finished[Result] | StageFailure) -> None:
        if isinstance(outcome, StageFailure):
            raise outcome.exception
        on_result(outcome.result)

    return hand_over


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _awaited(function: Callable[..., Awaitable[Value]], *arguments: Any) -> Value:
    return await function(*arguments)


async def _each(jobs: Iterable[Item] | AsyncIterable[Item]) -> AsyncGenerator[Item, None]:
    if isinstance(jobs, AsyncIterable):
        async for job in jobs:
            yield job
    else:
        for job in jobs:
            yield job
