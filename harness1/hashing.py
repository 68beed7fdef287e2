"""Canonical JSON and the sha256 of it: the one way a hash is made in this package (design: every artifact has one)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec


def canonical(value: Any) -> bytes:
    """Encode plain data or a record as JSON with sorted keys, so that equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def digest(value: Any) -> str:
    """The sha256 of the canonical JSON of a value, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def text_digest(text: str) -> str:
    """Sixteen hexadecimal digits of the sha256 of a text: enough to name a piece within one episode."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """The sha256 of a file's bytes; the empty string for a file that is not there."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
