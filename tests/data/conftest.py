"""What the tests of data share."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.data import apart


@pytest.fixture
def parquet_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read Parquet in this process: a process for each file takes a second, and `test_folder.py` tries that."""

    def rows(_: object, path: Path, columns: Sequence[str], most: int) -> Iterator[Any]:
        for packed in apart._read_rows(msgspec.msgpack.encode((os.fsencode(path), columns, most))):
            yield msgspec.msgpack.decode(packed)[0]

    monkeypatch.setattr(apart.ReadApart, "rows", rows)
