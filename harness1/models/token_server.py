"""What servers that take token ids share with vLLM in this process: changes of weights, and adapters."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness1.errors import HarnessError, InfrastructureFault, Refusal, UsageError, is_unconnected
from harness1.http.model_endpoint import ModelEndpoint
from harness1.model_folder import holds_adapters, open_tensors
from harness1.models.adapters import ADAPTER_WEIGHTS, read_adapter_config
from harness1.models.backend import EngineOutput, Grammar, SampledOutput, check_output
from harness1.plain import digest, file_digest
from harness1.records import Sampling


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in an engine, numbered from 1. Engines keep cached states by name: a name never gets other content."""

    name: str
    version: int
    number: int
    folder: Path
    calls: int = 0


class WeightGate:
    """The weights that an engine has in use. A change of whole weights waits until the calls in flight have ended, and
    later calls wait for it, so that every output is of one version. Of adapters, new calls use the newest, and calls in
    flight end on their own; the `kept` newest stay loaded for other clients."""

    def __init__(self, kept: int = 1) -> None:
        self._whole, self._calls, self._usable = 0, 0, True
        self._kept, self._count = max(1, kept), 0
        self._loaded: list[LoadedAdapter] = []
        """Oldest first."""
        self._changed: asyncio.Event | None = None
        self._drained = asyncio.Event()

    @property
    def version(self) -> int:
        return self._loaded[-1].version if self._loaded else self._whole

    @asynccontextmanager
    async def call(self) -> AsyncIterator[tuple[LoadedAdapter | None, int]]:
        """Use the newest adapter, if any, and the version of the weights; they must be in a known state."""
        while self._changed is not None:
            await self._changed.wait()
        if not self._usable:
            raise InfrastructureFault("the last change of weights failed; load them again")
        used, version = (self._loaded[-1] if self._loaded else None), self.version
        self._calls += 1
        if used is not None:
            used.calls += 1
        try:
            yield used, version
        finally:
            if used is not None:
                used.calls -= 1
            self._calls -= 1
            if not self._calls:
                self._drained.set()

    @asynccontextmanager
    async def change(self, version: int | None) -> AsyncIterator[None]:
        """Change the weights to a version (None: the same). A `UsageError` keeps the old ones, other errors none."""
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
            self._whole, self._usable = self._whole if version is None else version, True
        finally:
            self._changed = None
            changed.set()

    def open(self, folder: Path, version: int) -> LoadedAdapter:
        """Return the adapter in a folder; raise as `read_adapter_config`."""
        read_adapter_config(folder)
        name = f"harness1-{version}-{file_digest(folder / ADAPTER_WEIGHTS)[:8]}"
        if loaded := next((each for each in self._loaded if each.name == name), None):
            return loaded  # of another number, the engine would keep the same content twice
        self._count += 1
        return LoadedAdapter(name, version, self._count, folder)

    def add(self, adapter: LoadedAdapter) -> list[LoadedAdapter]:
        """Give an adapter to all calls from now on, as the engine has loaded it; return those to unload."""
        loaded = [*(each for each in self._loaded if each.name != adapter.name), adapter]
        unused = [each for each in loaded[: -self._kept] if not each.calls]
        self._loaded = [each for each in loaded if each not in unused]
        return unused

    def clear(self) -> list[LoadedAdapter]:
        """Remove and return all adapters: whole weights take their place."""
        loaded, self._loaded = self._loaded, []
        return loaded


TensorShapes = Mapping[str, tuple[int, ...]]
TIED_HEAD = "lm_head.weight"
"""The output head, which files of a model that ties it to its embedding may include or leave out."""


def weight_shapes(folder: Path) -> TensorShapes:
    """Return the shape of every tensor in a model's folder, without torch; raise as `open_tensors`."""
    with ExitStack() as stack:
        files = open_tensors(folder, stack, "np")
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}


def check_same_shapes(opened: TensorShapes, folder: Path) -> None:
    """Raise UsageError for weights of another architecture than the opened one, which may crash an engine."""
    found = weight_shapes(folder)
    others = {name for name in opened.keys() | found.keys() if opened.get(name) != found.get(name)}
    if TIED_HEAD not in opened or TIED_HEAD not in found:
        others.discard(TIED_HEAD)
    if others:
        raise UsageError(f"{folder} holds weights of another model: {', '.join(sorted(others)[:3])}")


PROBE_TEMPERATURES = (0.5, 2.0)
PROBE_TOKENS = 8
PROBE_DIFFERENCE = 0.1
"""In nats: above the effect of rounding and batching on a log probability, far below that of the two temperatures."""


class TokenServer(ABC):
    """A `Backend` over a server, with advice on how to start one with processed log probabilities or adapters."""

    raw_advice: ClassVar[str]
    adapter_advice: ClassVar[str]

    def __init__(self, endpoint: ModelEndpoint, model: str, kept: int = 2) -> None:
        self.model = model
        self.hash = digest(["token server", model])
        self._endpoint, self._gate = endpoint, WeightGate(kept)
        self._follows_temperature: bool | None = None

    @property
    def version(self) -> int:
        return self._gate.version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        self._check(sampling)
        async with self._gate.call() as (adapter, version):
            changed = sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
            if sampling.temperature and changed and not await self._is_processed(prompt_ids):
                raw = f"{self._endpoint.url} does not return log probabilities of the distribution that it samples from"
                raise UsageError(f"{raw}; {self.raw_advice}, or sample at temperature 1 with top_p 1 and top_k 0")
            name = None if adapter is None else adapter.name
            return check_output(await self._sample(prompt_ids, sampling, grammar, name), sampling, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Do as `WeightLoader.load_weights`; the server reads the folder under the same path."""
        folder = folder.resolve()
        if holds_adapters(folder):
            adapter = self._gate.open(folder, version)
            with advising(f"to load adapters, {self.adapter_advice}"):
                await self._load_adapter(adapter)
            unused = self._gate.add(adapter)
        else:
            weight_shapes(folder)
            async with self._gate.change(version):
                try:
                    await self._load(folder, version)
                except Refusal as error:
                    raise UsageError(str(error)) from error
            unused = self._gate.clear()
        for each in unused:
            with suppress(UsageError, InfrastructureFault):  # it may be gone, and a server evicts what takes room
                await self._unload_adapter(each.name)

    async def _is_processed(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if log probabilities depend on the temperature; tested once, after the reversed prompt."""
        if self._follows_temperature is None:
            prompt = tuple(reversed(prompt_ids))[:PROBE_TOKENS]
            cold, hot = [await self._best_logprob(prompt, each) for each in PROBE_TEMPERATURES]
            self._follows_temperature = cold - hot > PROBE_DIFFERENCE
        return self._follows_temperature

    @abstractmethod
    def _check(self, sampling: Sampling) -> None:
        """Raise UsageError if the server cannot sample in this way."""

    @abstractmethod
    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None, adapter: str | None
    ) -> EngineOutput:
        """Return one output, unchecked, with the adapter of a name."""

    @abstractmethod
    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float) -> float:
        """Return the server's log probability of the likeliest next token."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Make the server load weights; no call is in flight."""

    @abstractmethod
    async def _load_adapter(self, adapter: LoadedAdapter) -> None: ...

    @abstractmethod
    async def _unload_adapter(self, name: str) -> None: ...


@contextmanager
def advising(advice: str, of: type[HarnessError] = HarnessError) -> Iterator[None]:
    """Add advice to errors of a type; what a server refuses is the user's to mend."""
    try:
        yield
    except of as error:
        if is_unconnected(error):
            raise
        kind = UsageError if isinstance(error, (UsageError, Refusal)) else InfrastructureFault
        raise kind(f"{error}; {advice}") from error
