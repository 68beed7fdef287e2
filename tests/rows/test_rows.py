"""Training rows are checked when they are made, and hold what was recorded."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.errors import SchemaError, UsageError
from harness1.rows import RowFile, TrainRow, chain_row, per_request, write_rows
from harness1.rows.calls import CapturedCall

FIRST = CapturedCall("a", (1, 2), (3, 4), (-0.5, -0.25), version_start=3, version_end=4, session_id="s")
SECOND = CapturedCall("b", (1, 2, 3, 4, 5), (6,), (-1.0,), version_start=2, version_end=2, session_id="s")
MERGED = TrainRow(
    token_ids=(1, 2, 3, 4, 5, 6),
    loss_mask=(0, 0, 1, 1, 0, 1),
    rollout_logprobs=(0.0, 0.0, -0.5, -0.25, 0.0, -1.0),
    episode_id="s",
    group_id="g",
    versions=(2, 4),
    call_ids=("a", "b"),
)


def test_each_call_with_an_output_is_a_row() -> None:
    empty = CapturedCall("c", (1,), ())
    unknown = CapturedCall("d", (9,), (8,), session_id="t")
    first, second, third = per_request([SECOND, empty, FIRST, unknown], "g")
    assert first == TrainRow(
        (1, 2, 3, 4, 5, 6), (0, 0, 0, 0, 0, 1), (0.0,) * 5 + (-1.0,), None, "s", "g", (2, 2), ("b",)
    )
    assert second == TrainRow((1, 2, 3, 4), (0, 0, 1, 1), (0.0, 0.0, -0.5, -0.25), None, "s", "g", (3, 4), ("a",))
    assert third == TrainRow((9, 8), (0, 1), None, None, "t", "g", (0, 0), ("d",))


def test_a_chain_is_one_row_with_the_outputs_trained_and_log_probabilities_if_all_are_known() -> None:
    assert chain_row([FIRST, SECOND], "g") == MERGED
    assert chain_row([msgspec.structs.replace(FIRST, output_logprobs=None), SECOND]).rollout_logprobs is None
    assert msgspec.json.decode(msgspec.json.encode(MERGED), type=TrainRow) == MERGED


@pytest.mark.parametrize(
    "chain",
    [
        [msgspec.structs.replace(FIRST, prompt_ids=(1, 7)), SECOND],
        [msgspec.structs.replace(FIRST, output_ids=(3, 7)), SECOND],
        [SECOND, FIRST],
        [FIRST, FIRST, SECOND],
    ],
    ids=["another prompt", "another output", "backwards", "twice"],
)
def test_a_chain_that_is_none_is_refused(chain: list[CapturedCall]) -> None:
    with pytest.raises(AssertionError, match="does not continue the calls before it"):
        chain_row(chain)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss_mask": (0, 1)}, "2 loss_mask for 6 tokens"),
        ({"loss_mask": (0, 0, 1, 1, 0, 2)}, "0 and 1"),
        ({"rollout_logprobs": (0.0,)}, "1 rollout_logprobs for 6"),
        ({"rollout_logprobs": (0.0, 0.0, float("nan"), -0.25, 0.0, -1.0)}, "rollout_logprobs .* not finite"),
        ({"rollout_logprobs": (0.0, 0.0, -0.5, -0.25, 0.0, float("-inf"))}, "not finite"),
        ({"rollout_logprobs": (-0.1, 0.0, -0.5, -0.25, 0.0, -1.0)}, "not trained"),
        ({"advantages": (1.0,)}, "1 advantages for 6"),
        ({"advantages": (float("inf"),) * 6}, "advantages .* not finite"),
    ],
)
def test_a_row_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainRow(**{**msgspec.structs.asdict(MERGED), **fields})
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert({**msgspec.to_builtins(MERGED), **fields}, TrainRow)


def test_a_call_without_a_prompt_or_with_other_log_probabilities_than_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        CapturedCall("a", ())
    for logprobs in ((), (-1.0,), (-1.0, float("nan"))):
        with pytest.raises(ValueError, match="one finite log probability"):
            CapturedCall("a", (1,), (2, 3), logprobs)


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
