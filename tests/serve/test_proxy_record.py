"""Calls on disk: nothing is lost, nothing is torn, and rows can be built of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness1.errors import SchemaError, UsageError
from harness1.records import Sampling, ToolCall
from harness1.rows import per_request
from harness1.rows.calls import CALLS, TOKENS, RecordedCall, Recorder, read_calls, read_records, recording
from harness1.runs.files import read_stage


def made(call_id: str, **changes: Any) -> RecordedCall:
    whole: dict[str, Any] = {
        "session_id": "s",
        "dialect": "openai",
        "status": 200,
        "prompt_ids": (1, 2, 70_000),
        "output_ids": (3, 4),
        "output_logprobs": (-0.5, -0.25),
        "sampling": Sampling(seed=4),
        "actions": (ToolCall("search_corpus", {"query": "é"}),),
        "finish_reason": "stop",
        "version_end": 2,
    }
    return RecordedCall(call_id=call_id, **{**whole, **changes})


FAILED = made("f", status=502, error="dead", output_ids=(), output_logprobs=None)
WORDY = made("w", prompt_ids=(), output_ids=(), output_logprobs=None, untrainable="no ids", request={"messages": []})


def test_calls_are_read_as_they_were_written_with_tokens_in_the_side_file(tmp_path: Path) -> None:
    calls = [made("a"), FAILED, WORDY, made("b", prompt_ids=(9,))]
    with Recorder(tmp_path) as recorder:
        for call in calls:
            recorder.append(call)
        assert recorder.count == 4
    assert list(read_records(tmp_path)) == calls
    assert b"70000" not in (tmp_path / CALLS).read_bytes()
    words = (tmp_path / TOKENS).read_bytes()
    assert np.frombuffer(words[:20], "<i4").tolist() == [1, 2, 70_000, 3, 4]
    assert np.frombuffer(words[20:28], "<f4").tolist() == [-0.5, -0.25]


def test_only_whole_examples_become_rows(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for call in (made("a"), FAILED, WORDY, made("c", agent_id="sub", attempt=2)):
            recorder.append(call)
    found = list(read_calls(tmp_path))
    assert [(call.call_id, call.agent_id, call.attempt) for call in found] == [("a", "", 0), ("c", "sub", 2)]
    row = per_request(found)[0]
    assert (row.token_ids, row.episode_id, row.versions) == ((1, 2, 70_000, 3, 4), "s", (0, 2))
    assert row.rollout_logprobs == (0.0, 0.0, 0.0, -0.5, -0.25)


def test_damage_is_found_out(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.append(made("a"))
    words = (tmp_path / TOKENS).read_bytes()
    (tmp_path / TOKENS).write_bytes(b"\x01" + words[1:-1] + b"\x01")
    with pytest.raises(SchemaError, match=r"calls.jsonl:1: the tokens of call a are damaged"):
        list(read_records(tmp_path))
    (tmp_path / CALLS).write_text("{}\n")
    with pytest.raises(SchemaError, match=r"calls.jsonl:1"):
        list(read_records(tmp_path))
    with pytest.raises(UsageError, match="holds no"):
        list(read_calls(tmp_path / "nowhere"))


def test_the_card_says_how_it_ended(tmp_path: Path) -> None:
    def status() -> str:
        card = read_stage(tmp_path)
        return card.status

    with recording(tmp_path, {"upstream": "x"}) as recorder:
        recorder.append(made("a"))
        assert status() == "running"
    assert status() == "finished"
    with pytest.raises(KeyError), recording(tmp_path, {"upstream": "x"}):
        raise KeyError
    assert status() == "interrupted"
    assert len(list(read_records(tmp_path))) == 1


def test_a_folder_takes_one_proxy_at_a_time_and_one_kind_for_good(tmp_path: Path) -> None:
    def opened(folder: str, **inputs: object) -> None:
        with recording(tmp_path / folder, inputs):
            pass

    with Recorder(tmp_path / "held"), pytest.raises(UsageError, match="another process"):
        Recorder(tmp_path / "held")
    opened("run", upstream="x", reserve=5)
    opened("run", upstream="x", reserve=5)
    with pytest.raises(UsageError, match=r"differs in reserve\b"):
        opened("run", upstream="x", reserve=6)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("")
    with pytest.raises(UsageError, match="holds no record"):
        opened("other")
    with pytest.raises(UsageError, match="cannot write"):
        opened("other/notes/run")
