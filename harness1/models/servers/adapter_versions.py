"""The adapters that an engine holds at once: new calls use the newest, and calls in flight end on their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness1.hashing import file_digest
from harness1.models.transformers.adapter_files import ADAPTER_WEIGHTS, read_adapter_config


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in an engine. Names are never used for other content, because engines keep cached states by name."""

    name: str
    version: int
    number: int
    """From 1, in the order of loading."""
    folder: Path
    calls: int = 0


class AdapterVersions:
    """The adapters of one engine, oldest first.

    Args:
        kept: the newest ones that stay loaded although no call uses them; other clients of a server may.
    """

    def __init__(self, kept: int) -> None:
        self._kept, self._count = max(1, kept), 0
        self._loaded: list[LoadedAdapter] = []

    @property
    def newest(self) -> LoadedAdapter | None:
        return self._loaded[-1] if self._loaded else None

    def named(self, folder: Path, version: int) -> LoadedAdapter:
        """Return the adapter in a folder with its name; one that is loaded is the same.

        Raises:
            UsageError: there is none, or of a kind that is not supported.
        """
        read_adapter_config(folder)
        name = f"harness1-{version}-{file_digest(folder / ADAPTER_WEIGHTS)[:8]}"
        for loaded in self._loaded:
            if loaded.name == name:
                return loaded  # of another number, the engine would keep the same content twice
        self._count += 1
        return LoadedAdapter(name, version, self._count, folder)

    def add(self, adapter: LoadedAdapter) -> None:
        """Give an adapter to all calls from now on; the engine has loaded it."""
        self._loaded = [*(each for each in self._loaded if each.name != adapter.name), adapter]

    @contextmanager
    def in_use(self) -> Iterator[LoadedAdapter | None]:
        """Use the newest adapter for a call; None if there is none."""
        used = self.newest
        if used is None:
            yield None
            return
        used.calls += 1
        try:
            yield used
        finally:
            used.calls -= 1

    def take_unused(self) -> list[LoadedAdapter]:
        """Remove and return the adapters that no call uses, except the newest."""
        unused = [each for each in self._loaded[: -self._kept] if not each.calls]
        self._loaded = [each for each in self._loaded if each not in unused]
        return unused

    def clear(self) -> list[LoadedAdapter]:
        """Remove and return all: whole weights take their place."""
        loaded, self._loaded = self._loaded, []
        return loaded
