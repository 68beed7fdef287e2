"""Training rows on disk: one line of JSON each, read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.rows.row import TrainRow
from harness1.runs.files import refuse_full_disk, replacing

TOKEN_BYTES = 6
"""Minimum bytes of a token on disk: three digits of its id, one of its mask, two commas."""


def write_rows(path: Path, rows: Iterable[TrainRow]) -> int:
    """Write rows to a file atomically and return their number.

    All lines have all fields, `null` if there is no value: other readers of JSON see one type.

    Raises:
        OSError: the file cannot be written.
    """
    count = 0
    with replacing(path) as file:
        for row in rows:
            file.write(msgspec.json.encode(msgspec.structs.asdict(row)) + b"\n")
            count += 1
    return count


def check_room(folder: Path, tokens: int) -> None:
    """Check that the disk of a folder, which need not exist yet, has room for rows of this many tokens.

    Raises:
        UsageError: there is too little room.
    """
    refuse_full_disk(folder, tokens * TOKEN_BYTES)


class RowFile(Sequence[TrainRow]):
    """The rows of a file. Only their offsets and lengths are kept in memory; every row is checked once, when the file
    is opened.

    Attributes:
        lengths: tokens of each row, shape (rows,).
        trained: trained tokens of each row, shape (rows,).

    Raises:
        UsageError: there is no such file.
        SchemaError: a line is torn or not a row; the message says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        starts: list[int] = [0]
        lengths: list[int] = []
        trained: list[int] = []
        for line in self._lines():
            row = self._row(line, len(lengths))
            starts.append(starts[-1] + len(line))
            lengths.append(len(row.token_ids))
            trained.append(sum(row.loss_mask))
        self._starts = np.array(starts, np.int64)
        self.lengths: npt.NDArray[np.int64] = np.array(lengths, np.int64)
        self.trained: npt.NDArray[np.int64] = np.array(trained, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, place: int) -> TrainRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[TrainRow]: ...
    def __getitem__(self, place: int | slice) -> TrainRow | list[TrainRow]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        at = range(len(self))[place]
        with self.path.open("rb") as file:
            file.seek(int(self._starts[at]))
            return self._row(file.read(int(self._starts[at + 1] - self._starts[at])), at)

    def _lines(self) -> Iterator[bytes]:
        if not self.path.is_file():
            raise UsageError(f"there is no {self.path.name} in {self.path.parent}")
        with self.path.open("rb") as file:
            yield from file

    def _row(self, line: bytes, at: int) -> TrainRow:
        try:
            if not line.endswith(b"\n"):
                raise SchemaError(f"{self.path}:{at + 1}: the line is torn")
            return msgspec.json.decode(line, type=TrainRow)
        except MALFORMED as error:
            raise SchemaError(f"{self.path}:{at + 1}: not a training row: {error}") from error
