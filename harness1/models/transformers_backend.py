"""A transformers model in this process: one thread decodes the calls of all episodes together."""

from __future__ import annotations

import asyncio
import atexit
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness1.errors import HarnessError, InfrastructureFault, UsageError, optional
from harness1.model_folder import folder_hash
from harness1.models.adapters import Adapters, check_adapters, drop_adapters, keep_rounded, put_adapters
from harness1.models.backend import Grammar, SampledOutput, check_sampling
from harness1.models.causal_model import Dtype, MemoryReturns, check_weights, load_causal_model
from harness1.models.decoding import Decoder, DecodingRow, SlotModel
from harness1.models.grammar import GrammarCompiler
from harness1.plain import digest
from harness1.records import Sampling

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


IDLE_S = 5.0  # seconds without work after which the worker thread ends; the next call starts another
CLOSING_S = 10.0  # seconds that the exit of the process waits for the current step


def open_transformers(
    folder: Path,
    *,
    device: str,
    dtype: Dtype,
    threads: int,
    rows: int,
    cache_tokens: int,
    prefill_tokens: int | None = None,
) -> TransformersBackend:
    """Open the causal language model in a folder, on a device of torch, with weights and hidden states in `dtype`;
    `threads` are torch's in the whole process (0: as they are). Raise UsageError if that fails, or slots do not support
    its attention; MissingExtra."""
    with optional("train"):
        import torch
    if threads:
        torch.set_num_threads(threads)
    model = SlotModel(load_causal_model(folder, device, dtype))
    together = model.prefill_tokens if prefill_tokens is None else prefill_tokens
    return TransformersBackend(model, folder, dtype, rows, cache_tokens, together)


class TransformersBackend:
    """A `Backend` over one model. It is not tied to an event loop, and its thread does not keep the process alive."""

    def __init__(
        self, model: SlotModel, folder: Path, dtype: Dtype, rows: int, cache_tokens: int, prefill_tokens: int = 0
    ) -> None:
        self._model, self._folder, self._dtype = model, folder, dtype
        keep_rounded(model.model)
        self.hash = digest({"model": folder_hash(folder), "dtype": dtype})
        self.decoder = Decoder(model, rows, cache_tokens, prefill_tokens)
        self.version, self._usable = 0, True
        self._grammars: GrammarCompiler | None = None
        self._waiting: deque[_Call] = deque()
        self._swaps: deque[_Swap] = deque()
        self._running: dict[DecodingRow, _Call] = {}
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        self._check(ids, sampling)
        call = _Call(np.asarray(ids, dtype=np.int64), sampling, grammar)
        self._submit(self._waiting, call)
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            with self._changed, suppress(ValueError):  # if it is already running, the next step finds it cancelled
                self._waiting.remove(call)
            raise

    async def load_state(self, state: Weights, version: int) -> None:
        """Switch to adapters, or to a whole state dictionary, whose tensors must not change until this returns."""
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
        window, tokens = self._model.window, len(prompt_ids) + sampling.max_tokens
        if window is not None and tokens > window:
            raise UsageError(f"{tokens} tokens of prompt and output exceed the model's window of {window}")

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
                    self.decoder.step()

    def _collect(self) -> bool:
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
                self.decoder.release(row)
                del self._running[row]
                sampled = None
                if row.finish_reason is not None:
                    ids, logprobs = row.output_ids, tuple(row.logprobs)
                    sampled = SampledOutput(ids, logprobs, row.finish_reason, self.version, self.version)
                _answer(call.future, sampled, row.fault)

    def _swap(self) -> None:
        """Load the queued weights in order, once no row is running."""
        while self._swaps and not self._running:
            with self._changed:
                swap = self._swaps.popleft()
            if not swap.future.set_running_or_notify_cancel():
                continue
            with _Failing([swap.future]):
                self.decoder.reset()
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
        while not self._swaps and self.decoder.free and (calls := self._next()):
            rows: dict[DecodingRow, _Call] = {}
            for call in calls:
                with _Failing([call.future]):
                    if not self._usable:
                        raise InfrastructureFault("the last change of weights failed half-way; load them again")
                    grammar = None
                    if call.grammar is not None:
                        self._grammars = self._grammars or GrammarCompiler(self._folder, self._model.vocabulary)
                        grammar = self._grammars.start(call.grammar, call.sampling.stop_ids)
                    rows[DecodingRow(call.prompt, call.sampling, grammar)] = call
            if rows:
                with _Failing([call.future for call in rows.values()]):
                    self.decoder.admit(list(rows))
                    self._running |= rows

    def _next(self) -> list[_Call]:
        """Take the longest-waiting call that is still wanted, and those whose prompts are computed together with it."""
        with self._changed:
            for call in [call for call in self._waiting if call.future.done()]:
                self._waiting.remove(call)
            wanted = list(islice(self._waiting, self.decoder.free))
        if not wanted:
            return []
        taken: list[_Call] = []
        with _Failing([call.future for call in wanted]):
            taken = [wanted[place] for place in self.decoder.next_pass([call.prompt for call in wanted])]
        with self._changed:
            for call in taken:
                with suppress(ValueError):  # cancelled meanwhile
                    self._waiting.remove(call)
        return taken

    def _failing_all(self) -> _Failing:
        def forget() -> None:  # no state can be trusted, and memory may be what ran out
            self._running.clear()
            self.decoder.reset()

        return _Failing([call.future for call in self._running.values()], forget)


@dataclass(frozen=True, eq=False)
class _Call:
    prompt: NDArray[np.int64]
    sampling: Sampling
    grammar: Grammar | None
    future: Future[SampledOutput] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class _Swap:
    state: Weights
    version: int
    future: Future[None] = field(default_factory=Future)


class _Failing:
    """Cleans up after every exception and makes it a fault of the calls: the thread must not die while callers wait."""

    def __init__(self, futures: Sequence[Future[Any]], clean_up: Callable[[], None] = lambda: None) -> None:
        self._futures, self._clean_up = futures, clean_up

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None:
            if not isinstance(error, HarnessError):
                fault = InfrastructureFault(f"the model failed: {type(error).__name__}: {error}")
                fault.__cause__, error = error, fault
            self._clean_up()
            for future in self._futures:
                _answer(future, None, error)
        return True


def _answer(future: Future[Any], result: object, error: HarnessError | None = None) -> None:
    with suppress(InvalidStateError):  # answered already, or cancelled
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
