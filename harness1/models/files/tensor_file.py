"""Writing of safetensors files one tensor at a time: a model of any size takes the memory of its largest tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from harness1.runs.files import replacing, write_json

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Sizes of the types that are written, by their names in the format."""
ALIGNMENT = 8
"""The header ends at a multiple of this many bytes."""


class TensorInfo(NamedTuple):
    """The description of a tensor; `kind` is the format's name of its type."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return its size in bytes."""
        return prod(self.shape) * BYTES[self.kind]


def write_shards(
    folder: Path,
    tensors: Sequence[TensorInfo],
    load: Callable[[TensorInfo], Tensor],
    shard_bytes: int,
    on_file: Callable[[int, int], None],
) -> list[str]:
    """Write tensors into `model.safetensors`, or into several files and their index; return the names of the files.

    Args:
        load: returns a tensor as described; it is called once for each, in order.
        shard_bytes: the size at which a file ends; a file holds at least one tensor.
        on_file: called with the number of files done and of all.
    """
    shards = list(_shards(tensors, shard_bytes))
    names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for done, (name, shard) in enumerate(zip(names, shards, strict=True)):
        on_file(done, len(shards))
        _write(folder / name, shard, load)
    if len(shards) > 1:
        places = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        total = sum(each.size for each in tensors)
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    return names


def _shards(tensors: Sequence[TensorInfo], shard_bytes: int) -> Iterator[list[TensorInfo]]:
    shard: list[TensorInfo] = []
    size = 0
    for each in tensors:
        if shard and size + each.size > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(each)
        size += each.size
    yield shard


def _write(path: Path, tensors: Sequence[TensorInfo], load: Callable[[TensorInfo], Tensor]) -> None:
    """Write one file: 8 bytes with the size of the header, little-endian, the header as JSON, then the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        begin, end = end, end + each.size
        header[each.name] = {"dtype": each.kind, "shape": each.shape, "data_offsets": (begin, end)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    with replacing(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for each in tensors:
            file.write(_bytes(load(each), each))


def _bytes(value: Tensor, described: TensorInfo) -> memoryview:
    import torch

    assert tuple(value.shape) == described.shape, f"{described.name} has the shape {tuple(value.shape)}"
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data
