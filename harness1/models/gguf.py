"""GGUF, the files of llama.cpp (docs/gguf.md and ggml-common.h of github.com/ggml-org): facts of a model, and its
tensors, whose numbers are in blocks of a few bits each, as float32."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of facts, by their numbers."""
ALIGNMENT = 32
"""Tensors begin at a multiple of this many bytes, if no fact says another."""
CHUNK = 1 << 16
"""Blocks that are decoded at a time."""
HALVES, QUARTERS = (np.array([[bit] for bit in range(0, 8, step)], dtype=np.uint8) for step in (4, 2))
"""The lowest bit of each part of a byte."""


class Layout(NamedTuple):
    """How a type of tensors stores a block of `size` numbers: a scale `d`, a least value `m`, and the `low` four and
    the `high` other bits of each number; in blocks of 256, the scales of groups too."""

    name: str
    size: int
    block: np.dtype[Any]


def _layout(name: str, size: int, **fields: str) -> Layout:
    return Layout(name, size, np.dtype([*fields.items()]))


HALF = "<f2"
LAYOUTS: Mapping[int, Layout] = {
    0: _layout("F32", 1, plain="<f4"),
    1: _layout("F16", 1, plain=HALF),
    2: _layout("Q4_0", 32, d=HALF, low="16u1"),
    3: _layout("Q4_1", 32, d=HALF, m=HALF, low="16u1"),
    6: _layout("Q5_0", 32, d=HALF, high="4u1", low="16u1"),
    7: _layout("Q5_1", 32, d=HALF, m=HALF, high="4u1", low="16u1"),
    8: _layout("Q8_0", 32, d=HALF, whole="32i1"),
    12: _layout("Q4_K", 256, d=HALF, m=HALF, scales="12u1", low="128u1"),
    13: _layout("Q5_K", 256, d=HALF, m=HALF, scales="12u1", high="32u1", low="128u1"),
    14: _layout("Q6_K", 256, low="128u1", high="64u1", scales="16i1", d=HALF),
    30: _layout("BF16", 1, upper="<u2"),
}
"""The types that are read, by their numbers."""


class GgufTensor(NamedTuple):
    """A tensor of a file, of which `bytes` are all; it describes itself as slices of safetensors do."""

    layout: Layout
    shape: tuple[int, ...]
    bytes: Array

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return "F32"

    def decode(self) -> Array:
        """Return the numbers."""
        blocks = self.bytes.view(self.layout.block)
        numbers = np.empty((len(blocks), self.layout.size), dtype=np.float32)
        for begin in range(0, len(blocks), CHUNK):
            some = blocks[begin : begin + CHUNK]
            numbers[begin : begin + CHUNK] = _decode(some).reshape(len(some), -1)
        return numbers.reshape(self.shape)


class GgufFile:
    """An open file: its facts and its tensors. Raises ValueError: it is none, cut short, or of unknown types."""

    def __init__(self, path: Path) -> None:
        self._data: Array = np.memmap(path, dtype=np.uint8, mode="r")
        self._view, self._at = self._data.data, 0
        if bytes(self._take(4)) != MAGIC or self._number("<u4") not in VERSIONS:
            raise ValueError("it is no GGUF file of version 2 or 3 with the lower bytes first")
        count, facts = self._number("<u8"), self._number("<u8")
        self.facts: dict[str, Any] = {self._text(): self._value(self._number("<u4")) for _ in range(facts)}
        described = [self._describe() for _ in range(count)]
        every = self.facts.get("general.alignment", ALIGNMENT)
        start = -(-self._at // every) * every
        self.tensors = {name: self._tensor(name, kind, shape, start + at) for name, kind, shape, at in described}

    def _take(self, size: int) -> memoryview:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._view):
            raise ValueError("it is cut short")
        return self._view[begin : self._at]

    def _number(self, kind: str) -> Any:
        size = np.dtype(kind).itemsize
        return np.frombuffer(self._take(size), kind)[0].item()

    def _text(self) -> str:
        return str(self._take(int.from_bytes(self._take(8), "little")), "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"it has a fact of the unknown type {kind}")
        of, count = self._number("<u4"), self._number("<u8")
        if of in SCALARS:
            size = np.dtype(SCALARS[of]).itemsize
            return np.frombuffer(self._take(size * count), SCALARS[of]).tolist()
        return [self._value(of) for _ in range(count)]

    def _describe(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("<u4")
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]  # the fastest comes first
        return name, self._number("<u4"), shape, self._number("<u8")

    def _tensor(self, name: str, kind: int, shape: tuple[int, ...], begin: int) -> GgufTensor:
        if kind not in LAYOUTS:
            known = ", ".join(each.name for each in LAYOUTS.values())
            raise ValueError(f"its tensor {name!r} is of the type {kind} of ggml; these are read: {known}")
        layout = LAYOUTS[kind]
        blocks, rest = divmod(prod(shape), layout.size)
        end = begin + blocks * layout.block.itemsize
        if rest or end > len(self._data):
            raise ValueError(f"its tensor {name!r} is cut short")
        return GgufTensor(layout, shape, self._data[begin:end])


def _decode(blocks: Array) -> Array:
    """Return the numbers of blocks of one layout, multiplied and added in llama.cpp's order."""
    field: dict[str, Array] = {name: blocks[name] for name in blocks.dtype.names or ()}
    if "plain" in field:
        return field["plain"].astype(np.float32)
    if "upper" in field:
        return (field["upper"].astype(np.uint32) << 16).view(np.float32)
    scale: Array = field["d"].astype(np.float32)[:, None]
    low, high, count = field.get("low"), field.get("high"), len(blocks)
    numbers: Array
    if low is None:  # Q8_0
        return scale * field["whole"]
    if "scales" not in field:  # the first half of a block is in the lower four bits
        numbers = (low[:, None] >> HALVES & 15).reshape(count, 32)
        if high is not None:
            numbers |= np.unpackbits(high, axis=1, bitorder="little") << 4
        if "m" in field:
            return np.asarray(scale * numbers + field["m"].astype(np.float32)[:, None])
        return scale * (numbers.astype(np.int8) - (8 if high is None else 16))
    if high is not None and "m" not in field:  # Q6_K: 16 groups of 16
        numbers = (low.reshape(count, 2, 1, 64) >> HALVES & 15).reshape(count, 2, 4, 32)
        numbers |= (high.reshape(count, 2, 1, 32) >> QUARTERS & 3) << 4
        signed = (numbers.astype(np.int8) - 32).reshape(count, 16, 16)
        return (scale * field["scales"])[..., None] * signed
    scales, leasts = _unpack_scales(field["scales"])  # Q4_K and Q5_K: 8 groups of 32
    numbers = (low.reshape(count, 4, 1, 32) >> HALVES & 15).reshape(count, 8, 32)
    if high is not None:
        numbers |= (high[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    least = field["m"].astype(np.float32)[:, None] * leasts
    return np.asarray((scale * scales)[..., None] * numbers - least[..., None])


def _unpack_scales(packed: Array) -> tuple[Array, Array]:
    """Return the scales and the least values of 8 groups, 6 bits each, from 12 bytes: of the last four groups, the
    upper two bits are above those of the first four, and the lower four share the last four bytes."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    return scales, np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
