"""What a folder of weights holds, by the headers of its safetensors files: checked before an engine is sent there,
for one that finds something else may die of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness1.errors import UsageError

Shapes = Mapping[str, tuple[int, ...]]
TIED_HEAD = "lm_head.weight"
"""Files of a model whose output head is its embedding may hold the head, or leave it out."""
LONGEST_HEADER = 100_000_000
"""In bytes, as the format has it."""


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


def weight_shapes(folder: Path) -> Shapes:
    """The shape of every tensor in the safetensors files of a folder, by name.

    Raises:
        UsageError: there are none, or they cannot be read as such.
    """
    try:
        shapes = {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _header(path).items()}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"the weights in {folder} cannot be read: {error}") from error
    if not shapes or not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no model: it needs config.json and weights as safetensors")
    return shapes


def check_same_shapes(opened: Shapes, folder: Path) -> None:
    """Refuse a folder whose weights are not of the architecture that was opened.

    Raises:
        UsageError: they are not, or there are none.
    """
    found = weight_shapes(folder)
    others = {name for name in opened.keys() | found.keys() if opened.get(name) != found.get(name)}
    if TIED_HEAD not in opened or TIED_HEAD not in found:
        others.discard(TIED_HEAD)
    if others:
        raise UsageError(f"{folder} holds weights of another model: {', '.join(sorted(others)[:3])}")


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """The format: the length of the header in 8 bytes, lowest first; the header as JSON; the tensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, LONGEST_HEADER))
    if len(header) < size:
        raise msgspec.DecodeError(f"{path.name} is no safetensors file")
    entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    return {
        name: msgspec.json.decode(entry, type=_Tensor).shape
        for name, entry in entries.items()
        if name != "__metadata__"
    }
