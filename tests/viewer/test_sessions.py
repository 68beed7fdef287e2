"""The record of a proxy in the viewer: its calls in order, and only what was recorded of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.rows.calls import RecordedCall, recording
from harness1.viewer.pages import Asked, write_view
from harness1.viewer.work import hold_sessions, is_recording, read_sessions
from tests.cli.commands import command_in_process
from tests.viewer.making import script, some_tasks, write_run
from tests.viewer.recordings import FIRST, SECOND, save_student, write_recording
from tests.viewer.test_write import opened


def test_a_session_holds_its_calls_in_order_and_what_each_added(tmp_path: Path) -> None:
    chat = save_student(tmp_path / "student")
    folder = write_recording(tmp_path / "agent", tmp_path / "student", chat)
    assert is_recording(folder)
    talk, other = read_sessions(folder)
    first, second, failed = talk["calls"]
    assert (first["prompt"], first["output"], first["reused"]) == (FIRST, "A poet's daughter.", None)
    assert (second["prompt"], second["reused"]) == (SECOND, first["prompt_tokens"] + first["output_tokens"])
    assert (first["waited"], first["seconds"], first["mean_logprob"]) == (0.5, 1.5, -0.5)
    assert (failed["error"], failed["seconds"], failed["output"], failed["output_tokens"]) == ("gone", None, None, None)
    (plain,) = other["calls"]
    assert plain["messages"] == [{"role": "user", "content": FIRST}]
    assert (plain["reply"]["content"], plain["prompt"], plain["versions"]) == ("A countess.", None, None)


def test_a_chat_without_tokens_shows_what_is_new_in_each_call(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": FIRST}, "no message", None]
    reply = {"role": "assistant", "content": "A countess."}
    asked = {"role": "user", "content": SECOND}
    call = RecordedCall(
        call_id="a",
        session_id="chat",
        dialect="openai",
        t_arrived=1.0,
        status=200,
        request={"messages": messages},
        reply=reply,
    )
    more = {"messages": [*messages, reply, asked]}
    later = msgspec.structs.replace(call, call_id="b", t_arrived=3.0, request=more)
    with recording(tmp_path / "agent", {}) as recorder:
        for each in (call, later):
            recorder.append(each)
    ((first, second),) = (session["calls"] for session in read_sessions(tmp_path / "agent"))
    assert (first["earlier"], first["messages"]) == (0, messages)
    assert (second["earlier"], second["messages"]) == (4, [asked])


def test_tokens_of_another_tokenizer_are_not_decoded(tmp_path: Path) -> None:
    chat = save_student(tmp_path / "student")
    folder = write_recording(tmp_path / "agent", tmp_path / "student", chat, form="another")
    first = read_sessions(folder)[0]["calls"][0]
    assert (first["prompt"], first["output"]) == (None, None)
    assert first["output_tokens"] > 0


def test_sessions_that_have_no_room_are_only_listed(tmp_path: Path) -> None:
    chat = save_student(tmp_path / "student")
    folder = write_recording(tmp_path / "agent", tmp_path / "student", chat)
    whole = hold_sessions([folder], 1_000_000)
    assert [row["held"] for row, _ in whole] == [True, True]
    small = hold_sessions([folder], len(whole[1][1]))
    assert [(row["held"], bool(text)) for row, text in small] == [(False, False), (True, True)]


def test_a_recording_is_viewed_beside_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = save_student(tmp_path / "student")
    folder = write_recording(tmp_path / "agent", tmp_path / "student", chat)
    write_run(tmp_path / "run", [script()], some_tasks(1), None)
    out = tmp_path / "view.html"
    done = command_in_process(monkeypatch, capsys)("view", str(folder), "--out", str(out), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["episodes"] == 0
    assert [(row["name"], row["calls"], row["failed"]) for row in opened(out)["sessions"]] == [
        ("talk", 3, 1),
        ("chat", 1, 0),
    ]
    write_view(Asked([folder, tmp_path / "run"], workers=1), out)
    assert {"s0", "s1", "e0"} <= set(opened(out)["tags"])
