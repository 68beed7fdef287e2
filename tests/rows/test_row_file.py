"""Rows come back from disk one at a time, and a damaged file says where it is damaged."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness1.errors import SchemaError, UsageError
from harness1.rows import RowFile, TrainRow, write_rows

ROWS = [
    TrainRow((5, 6, 7), (0, 1, 1), None, (0.0, 0.5, 0.5), episode_id="e", call_ids=("c",), metadata={"turns": [1]}),
    TrainRow((5,), (1,), (-0.25,), versions=(1, 2)),
    TrainRow((1, 2), (0, 0)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return tmp_path / "rows.jsonl"


def test_rows_come_back_as_they_were_written(path: Path) -> None:
    rows = RowFile(path)
    assert list(rows) == ROWS
    assert [rows[place] for place in (2, 0, -1, 1)] == [ROWS[2], ROWS[0], ROWS[2], ROWS[1]]
    assert rows[1:] == ROWS[1:]
    assert (rows.lengths.tolist(), rows.trained.tolist()) == ([3, 1, 2], [2, 1, 0])
    with pytest.raises(IndexError):
        rows[3]
    keys = [list(msgspec.json.decode(line)) for line in path.read_bytes().splitlines()]
    assert keys == [list(TrainRow.__struct_fields__)] * 3
    assert write_rows(path, []) == len(RowFile(path)) == 0


def test_a_write_that_fails_leaves_the_file_that_was_there(path: Path) -> None:
    before = path.read_bytes()

    def rows() -> Iterator[TrainRow]:
        yield ROWS[0]
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_rows(path, rows())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("line", ['{"token_ids":[1],"loss_mask":[1,1]}', '{"token_ids":[1]}', "x", '{"loss_mask":[2]}'])
def test_damaged_and_torn_lines_are_refused_by_their_numbers_and_a_missing_file_by_name(path: Path, line: str) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SchemaError, match=r"rows\.jsonl:3: the line is torn"):
        RowFile(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
    with pytest.raises(SchemaError, match=r"rows\.jsonl:2: not a training row"):
        RowFile(path)
    path.unlink()
    with pytest.raises(UsageError, match=r"there is no rows\.jsonl in"):
        RowFile(path)
