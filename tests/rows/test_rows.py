"""Training rows are checked when they are made, and hold what was recorded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness1.rows import TrainRow, chain_row, per_request
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
