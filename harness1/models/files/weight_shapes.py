"""Shapes of a folder's weights, from the headers of its safetensors files. They are checked before an engine loads
the folder, because unexpected weights may crash it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness1.errors import MALFORMED, UsageError

Shapes = Mapping[str, tuple[int, ...]]
TIED_HEAD = "lm_head.weight"
"""The output head, which files of a model that ties it to its embedding may include or leave out."""
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the format."""


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


def weight_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor in the safetensors files of a folder, by name.

    Raises:
        UsageError: there are no such files, or they cannot be read.
    """
    try:
        shapes = {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _header(path).items()}
    except (OSError, *MALFORMED) as error:
        raise UsageError(f"the weights in {folder} cannot be read: {error}") from error
    if not shapes or not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a model: it needs config.json and safetensors weights")
    return shapes


def check_same_shapes(opened: Shapes, folder: Path) -> None:
    """Refuse a folder whose weights are of another architecture than the opened one.

    Raises:
        UsageError: they are of another architecture, or missing.
    """
    found = weight_shapes(folder)
    others = {name for name in opened.keys() | found.keys() if opened.get(name) != found.get(name)}
    if TIED_HEAD not in opened or TIED_HEAD not in found:
        others.discard(TIED_HEAD)
    if others:
        raise UsageError(f"{folder} holds weights of another model: {', '.join(sorted(others)[:3])}")


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a file's header: 8 bytes with its size, little-endian, then JSON, then the tensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, LONGEST_HEADER))
    if len(header) < size:
        raise msgspec.DecodeError(f"{path.name} is not a safetensors file")
    entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    return {
        name: msgspec.json.decode(entry, type=_Tensor).shape
        for name, entry in entries.items()
        if name != "__metadata__"
    }
