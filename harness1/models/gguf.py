"""GGUF, the files of llama.cpp (docs/gguf.md of github.com/ggml-org): facts of a model, and its tensors, whose blocks
of a few bits a number the package `gguf` decodes. Its own reader goes on for ever after a false count."""

from __future__ import annotations

from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness1.errors import optional

Array = np.ndarray[Any, np.dtype[Any]]
MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of facts, by their numbers."""
ALIGNMENT = 32  # tensors begin at a multiple of this many bytes, if no fact says another
ROWS = 1024  # rows that are decoded at a time


class GgufTensor(NamedTuple):
    """A tensor of a file, of which `bytes` are all; it describes itself as slices of safetensors do."""

    kind: Any  # a `GGMLQuantizationType`
    shape: tuple[int, ...]
    bytes: Array

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return "F32"

    def decode(self) -> Array:
        """Return the numbers."""
        from gguf import dequantize

        rows = self.bytes.reshape(prod(self.shape[:-1]), -1)
        numbers = np.empty((len(rows), self.shape[-1]), dtype=np.float32)
        for begin in range(0, len(rows), ROWS):
            numbers[begin : begin + ROWS] = dequantize(rows[begin : begin + ROWS], self.kind)
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
        self._described = [(name, kind, shape, start + at) for name, kind, shape, at in described]

    @cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        """The tensors by name."""
        with optional("train"):
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
        found = dict[str, GgufTensor]()
        for name, number, shape, begin in self._described:
            kind = GGMLQuantizationType(number)
            size, width = GGML_QUANT_SIZES[kind]
            dequantize(np.zeros((1, width), dtype=np.uint8), kind)  # raises NotImplementedError now, not half-way
            blocks, rest = divmod(prod(shape), size)
            end = begin + blocks * width
            if rest or end > len(self._data):
                raise ValueError(f"its tensor {name!r} is cut short")
            found[name] = GgufTensor(kind, shape, self._data[begin:end])
        return found

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
