"""Training rows are checked when they are made, and hold what was recorded."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.errors import SchemaError, UsageError
from harness1.records import Episode, Status
from harness1.rl.logprobs import calls_to_replay
from harness1.rows import Merged, RowFile, TrainRow, chain_row, per_request, prefix_merging, write_rows
from harness1.rows.calls import CapturedCall, calls_for_rows, calls_of, prompt_ids
from tests.policy.test_language_model import NONSENSE, episode_of, sayer
from tests.support import call, search

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
    assert (path.read_bytes(), list(path.parent.iterdir())) == (before, [path])


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


END = call("end_search")
ORDERS = ("paper", "stable_first", "epoch", "transcript")


def completed(order: str = "paper") -> Episode:
    return episode_of(sayer(search("river"), NONSENSE, NONSENSE, search("war"), search("town"), END), order)


def failed(order: str = "paper", retries: int = 3) -> Episode:
    return episode_of(sayer(search("river"), search("war"), *[NONSENSE] * 9), order, format_retries=retries)


def merged(episode: Episode) -> Merged:
    return prefix_merging(calls_for_rows(episode))


def trained(episode: Episode) -> set[str]:
    return {name.partition("/")[2] for row in merged(episode).rows for name in row.call_ids}


def test_every_sampled_call_is_replayed_with_its_whole_prompt_in_the_order_made() -> None:
    model = sayer(search("river"), NONSENSE, search("war"), END)
    episode = episode_of(model)
    sampled = list(calls_to_replay(episode))
    assert [made.prompt_ids for made in sampled] == model.prompts
    assert [made.sampling for made in sampled] == model.samplings
    recorded = list(calls_of(episode))
    assert [made.output_ids for made in sampled] == [made.output_ids for made in recorded]
    assert [made.output_logprobs for made in sampled] == [made.output_logprobs for made in recorded]


def test_of_a_turn_that_acted_the_attempt_that_acted_is_trained_on() -> None:
    captured = list(calls_for_rows(completed()))
    episode = completed()
    assert [made.call_id for made in captured] == [
        f"{episode.episode_id}/{name}" for name in ("1.0", "2.2", "3.0", "4.0")
    ]
    assert [made.attempt for made in captured] == [0, 2, 0, 0]
    assert {(made.session_id, made.agent_id) for made in captured} == {(episode.episode_id, "")}
    assert {(made.version_start, made.version_end) for made in captured} == {(7, 8)}
    assert [made.prompt_ids for made in captured] == [prompt_ids(episode, turn.calls[-1]) for turn in episode.turns]
    assert all(made.output_logprobs and len(made.output_logprobs) == len(made.output_ids) for made in captured)


def test_failed_attempts_are_trained_on_only_where_they_ended_the_episode() -> None:
    episode = failed()
    assert episode.status is Status.POLICY_ERROR
    names = [made.call_id.partition("/")[2] for made in calls_for_rows(episode)]
    assert names == ["1.0", "2.0", "3.0", "3.1", "3.2", "3.3"]
    broken = msgspec.structs.replace(episode, status=Status.INFRA_ERROR)
    assert list(calls_for_rows(broken)) == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_no_failed_attempt_passes_for_a_retry_of_another(order: str, retries: int) -> None:
    episode = failed(order, retries)
    made = merged(episode)
    attempts = list(calls_for_rows(episode))[3:]  # those after the first have one prompt, and say the same
    assert len({(made.prompt_ids, made.output_ids) for made in attempts}) <= 1
    assert trained(episode) == {"1.0", "2.0", *[f"3.{attempt}" for attempt in range(retries + 1)]}
    assert trained(completed(order)) == {"1.0", "2.2", "3.0", "4.0"}
    for each in (made, merged(completed(order))):
        assert each.superseded == each.quarantine == each.empty == ()


def test_calls_without_tokens_are_no_calls_and_those_without_log_probabilities_are_not_replayed() -> None:
    def changed(**fields: tuple[()]) -> Episode:
        episode, replace = completed(), msgspec.structs.replace
        turns = (replace(turn, calls=tuple(replace(made, **fields) for made in turn.calls)) for turn in episode.turns)
        return replace(episode, turns=tuple(turns))

    bare = changed(output_ids=(), output_logprobs=())
    assert [*calls_to_replay(bare), *calls_for_rows(bare)] == []
    unknown = changed(output_logprobs=())
    assert list(calls_to_replay(unknown)) == []
    assert [made.output_logprobs for made in calls_for_rows(unknown)] == [None] * 4


def test_a_record_without_a_stretch_of_a_prompt_is_refused() -> None:
    episode = completed()
    name = next(iter(episode.segments))
    torn = msgspec.structs.replace(episode, segments={key: ids for key, ids in episode.segments.items() if key != name})
    for calls in (calls_to_replay, calls_for_rows):
        with pytest.raises(SchemaError, match="lacks the prompt segment"):
            list(calls(torn))
