"""Canonical JSON and its sha256: the only way hashes are made in this package (design: every artifact has one)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec


def canonical(value: Any) -> bytes:
    """Encode plain data or a record as JSON with sorted keys: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def digest(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def text_digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's sha256, enough to identify a piece within one episode."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes, or the empty string if there is no such file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
