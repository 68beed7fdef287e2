"""A transformers model in this process: one thread decodes the calls of all episodes together."""

from __future__ import annotations

import asyncio
import atexit
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness1.errors import HarnessError, InfrastructureFault, UsageError, optional
from harness1.model_folder import check_base, folder_hash, holds_adapters
from harness1.models.adapters import Adapters, check_adapters, drop_adapters, keep_rounded, put_adapters, read_adapters
from harness1.models.backend import Grammar, SampledOutput, check_sampling
from harness1.models.causal_model import Dtype, MemoryReturns, check_weights, load_causal_model
from harness1.models.decoding import Decoder, DecodingRow, DecodingStats
from harness1.models.grammar import GrammarCompiler
from harness1.models.slots import SlotModel
from harness1.plain import digest
from harness1.records import Sampling

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


Result = TypeVar("Result")

IDLE_S = 5.0
"""Seconds without work after which the worker thread ends; the next call starts another."""

CLOSING_S = 10.0
"""Seconds that the exit of the process waits for the current step."""


def open_transformers(
    folder: Path, *, device: str, dtype: Dtype, threads: int, rows: int, cache_tokens: int, prefill_tokens: int = 0
) -> TransformersBackend:
    """Open the causal language model in a folder.

    Args:
        device: torch's name of the device: `cpu`, `cuda`, `cuda:1`.
        dtype: of weights and hidden states; logits are always float32.
        threads: torch's threads in the whole process; 0 leaves them unchanged.
        rows, cache_tokens, prefill_tokens: see `Decoder`.

    Raises:
        UsageError: the folder holds no such model, torch has no such device, or slots do not support its attention.
        MissingExtra: torch or transformers is not installed.
    """
    with optional("train"):
        import torch
    if threads:
        torch.set_num_threads(threads)
    model = SlotModel(load_causal_model(folder, device, dtype))
    return TransformersBackend(model, folder, dtype, rows, cache_tokens, prefill_tokens)


class TransformersBackend:
    """A `Backend` over one model. It is not tied to an event loop, and its thread does not keep the process alive."""

    def __init__(
        self, model: SlotModel, folder: Path, dtype: Dtype, rows: int, cache_tokens: int, prefill_tokens: int = 0
    ) -> None:
        if rows < 1 or cache_tokens < 0:
            raise UsageError(f"machine.model.rows={rows} and cache_tokens={cache_tokens} must be at least 1 and 0")
        self._model, self._folder, self._dtype = model, folder, dtype
        keep_rounded(model.model)
        self.hash = digest({"model": folder_hash(folder), "dtype": dtype})
        self._decoder = Decoder(model, rows, cache_tokens, prefill_tokens)
        self.version, self._usable = 0, True
        self._grammars: GrammarCompiler | None = None
        self._waiting: deque[_Call] = deque()
        self._swaps: deque[_Swap] = deque()
        self._running: dict[DecodingRow, _Call] = {}
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False

    def stats(self) -> DecodingStats:
        """Return the cost of decoding since the backend was opened."""
        return self._decoder.stats

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        self._check(prompt_ids, sampling)
        call = _Call(prompt_ids, sampling, grammar)
        self._submit(self._waiting, call)
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            with self._changed, suppress(ValueError):  # if it is already running, the next step finds it cancelled
                self._waiting.remove(call)
            raise

    async def load_adapter(self, folder: Path, version: int) -> None:
        await asyncio.to_thread(check_base, folder, self._folder)
        await self.load_state(await asyncio.to_thread(read_adapters, folder), version)

    async def load_weights(self, folder: Path, version: int) -> None:
        if holds_adapters(folder):
            raise UsageError(f"{folder} holds adapters and no whole weights: harness1 models merge makes some")
        model = await asyncio.to_thread(load_causal_model, folder, "cpu", self._dtype)
        await self.load_state(model.state_dict(), version)

    async def load_state(self, state: Weights, version: int) -> None:
        """Switch to other adapters on the same base, or to the whole weights of a state dictionary, and raise as
        `load_weights` does. They are copied, and must not change until this returns."""
        if isinstance(state, Adapters):
            check_adapters(self._model.model, state)
        else:
            check_weights(self._model.model, state)
        swap = _Swap(state, version)
        self._submit(self._swaps, swap)
        await asyncio.wrap_future(swap.future)

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        check_sampling(sampling)
        if not prompt_ids:
            raise UsageError("a prompt needs at least one token")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._model.vocabulary:
            raise UsageError(f"a prompt has token ids beyond the model's vocabulary of {self._model.vocabulary}")
        window, wanted = self._model.window, len(prompt_ids) + sampling.max_tokens
        if window is not None and wanted > window:
            raise UsageError(
                f"a prompt of {len(prompt_ids)} tokens and an output of {sampling.max_tokens} do not fit the model's "
                f"window of {window}"
            )

    def _submit(self, queue: deque[_Call] | deque[_Swap], job: _Call | _Swap) -> None:
        with self._changed:
            queue.append(job)  # type: ignore[arg-type]
            if self._thread is None:
                self._thread = Thread(target=self._run, name="decoder", daemon=True)
                self._thread.start()
                # A thread that is killed inside torch aborts the whole process.
                atexit.register(self._close)
            self._changed.notify()

    def _run(self) -> None:
        returns = MemoryReturns()
        while self._collect():
            returns.tick()
            self._settle()
            self._swap()
            self._admit()
            self._settle()  # an output of one token ends with its prefill
            if self._running:
                with self._failing_all():
                    self._decoder.step()

    def _collect(self) -> bool:
        """Wait for work; return False if none comes for `IDLE_S`."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._running or self._waiting or self._swaps or self._closed, IDLE_S)
            if not came or self._closed:
                self._thread = None
                atexit.unregister(self._close)
                return False
            return True

    def _close(self) -> None:
        """At exit of the process: let the current step finish, begin no other."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(CLOSING_S)

    def _settle(self) -> None:
        """Answer and remove rows that have ended, and remove rows that nobody waits for any more."""
        with self._failing_all():
            for row, call in list(self._running.items()):
                if row.finish_reason is None and row.fault is None and not call.future.done():
                    continue
                self._decoder.release(row)
                del self._running[row]
                if row.fault is not None:
                    _fail(call.future, row.fault)
                elif row.finish_reason is not None:
                    sampled = row.output_ids, tuple(row.logprobs), row.finish_reason
                    _answer(call.future, SampledOutput(*sampled, self.version, self.version))

    def _swap(self) -> None:
        """Load the queued weights in order, once no row is running."""
        while self._swaps and not self._running:
            with self._changed:
                swap = self._swaps.popleft()
            if not swap.future.set_running_or_notify_cancel():
                continue
            with _Failing([swap.future]):
                self._decoder.reset()
                self._usable = False
                if isinstance(swap.state, Adapters):
                    put_adapters(self._model.model, swap.state)
                    keep_rounded(self._model.model)
                else:
                    drop_adapters(self._model.model)
                    self._model.model.load_state_dict(swap.state, strict=False)  # one name of tied weights is enough
                self.version, self._usable = swap.version, True
                _answer(swap.future, None)

    def _admit(self) -> None:
        """Fill the free places, unless running rows must finish first because new weights are queued."""
        while not self._swaps and self._decoder.free and (calls := self._next()):
            rows: dict[DecodingRow, _Call] = {}
            for call in calls:
                with _Failing([call.future]):
                    if not self._usable:
                        raise InfrastructureFault("the last change of weights failed half-way; load them again")
                    grammar = None
                    if call.grammar is not None:
                        self._grammars = self._grammars or GrammarCompiler(self._folder, self._model.vocabulary)
                        grammar = self._grammars.start(call.grammar, call.sampling.stop_ids)
                    rows[DecodingRow(call.prompt_ids, call.sampling, grammar)] = call
            if rows:
                with _Failing([call.future for call in rows.values()]):
                    self._decoder.admit(list(rows))
                    self._running |= rows

    def _next(self) -> list[_Call]:
        """Take the longest-waiting call that is still wanted, and those whose prompts are computed together with it."""
        with self._changed:
            for call in [call for call in self._waiting if call.future.done()]:
                self._waiting.remove(call)
            wanted = list(islice(self._waiting, self._decoder.free))
        if not wanted:
            return []
        taken: list[_Call] = []
        with _Failing([call.future for call in wanted]):
            taken = [wanted[place] for place in self._decoder.next_pass([call.prompt for call in wanted])]
        with self._changed:
            for call in taken:
                with suppress(ValueError):  # cancelled meanwhile
                    self._waiting.remove(call)
        return taken

    def _failing_all(self) -> _Failing:
        return _Failing([call.future for call in self._running.values()], self._forget)

    def _forget(self) -> None:
        """Drop everything after a failure of all rows: no state can be trusted, and memory may be what ran out."""
        self._running.clear()
        self._decoder.reset()


@dataclass(frozen=True, eq=False)
class _Call:
    prompt_ids: Sequence[int]
    sampling: Sampling
    grammar: Grammar | None
    future: Future[SampledOutput] = field(default_factory=Future)

    @cached_property
    def prompt(self) -> NDArray[np.int64]:
        return np.asarray(self.prompt_ids, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Swap:
    state: Weights
    version: int
    future: Future[None] = field(default_factory=Future)


class _Failing:
    """A context that turns every exception into a fault of the calls, and then cleans up: the thread must not die while
    callers wait."""

    def __init__(self, futures: Sequence[Future[Any]], clean_up: Callable[[], None] | None = None) -> None:
        self._futures, self._clean_up = futures, clean_up

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return True
        if not isinstance(error, HarnessError):
            fault = InfrastructureFault(f"the model failed: {type(error).__name__}: {error}")
            fault.__cause__, error = error, fault
        if self._clean_up is not None:
            self._clean_up()
        for future in self._futures:
            _fail(future, error)
        return True


def _answer(future: Future[Result], result: Result) -> None:
    with suppress(InvalidStateError):  # the caller may have been cancelled meanwhile
        future.set_result(result)


def _fail(future: Future[Any], error: HarnessError) -> None:
    with suppress(InvalidStateError):  # answered already, or cancelled
        future.set_exception(error)
