"""The weights that an engine has in use: whole ones, or adapters beside them; and their shapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from harness1.errors import InfrastructureFault, UsageError
from harness1.model_folder import ADAPTER_CONFIG, open_tensors
from harness1.models.adapters import ADAPTER_WEIGHTS, read_adapter_config
from harness1.plain import digest, file_digest


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
        self._loaded: list[LoadedAdapter] = []  # oldest first
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
        content = digest([file_digest(folder / each) for each in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)])
        name = f"harness1-{version}-{content[:12]}"
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


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a model's folder, without torch; raise as `open_tensors`."""
    with ExitStack() as stack:
        files = open_tensors(folder, stack, "np")
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
