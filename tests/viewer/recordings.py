"""A small record of a proxy, for tests of the viewer."""

from pathlib import Path

import msgspec

from harness1.models.chat_format import ChatFormat
from harness1.records import Sampling, ToolCall
from harness1.rows.calls import RecordedCall, recording
from tests.vocabularies import chat_format, vocabulary

FIRST, SECOND = "Who was Ada?", " And her father?"


def save_student(folder: Path) -> ChatFormat:
    """The tokenizer of a recorded model, in a folder; its format."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(vocabulary("qwen"))
    return chat_format("hermes", "qwen")


def write_recording(folder: Path, model: Path, chat: ChatFormat, form: str = "") -> Path:
    """Two sessions: two calls that are one conversation and a failed one, and a chat without tokens."""
    ids = chat.tokenizer.encode
    prompt, output = ids(FIRST), ids("A poet's daughter.")
    made = {"status": 200, "finish_reason": "stop", "sampling": Sampling(), "dialect": "openai", "session_id": "talk"}
    times = {"t_arrived": 10.0, "t_start": 10.5, "t_end": 12.0}
    logprobs = tuple(-0.5 for _ in output)
    spoken = {"output_ids": tuple(output), "output_logprobs": logprobs, "actions": (ToolCall("look", {"at": "her"}),)}
    call = RecordedCall(call_id="a", prompt_ids=tuple(prompt), **made, **times, **spoken)
    longer = (*prompt, *output, *ids(SECOND))
    later = msgspec.structs.replace(call, call_id="b", prompt_ids=longer, t_arrived=20.0, t_start=20.0, t_end=21.0)
    said = {"messages": [{"role": "user", "content": FIRST}]}
    bare = {"prompt_ids": (), "output_ids": (), "output_logprobs": None, "actions": ()}
    plain = msgspec.structs.replace(call, call_id="c", session_id="chat", t_arrived=15.0, request=said, **bare)
    plain = msgspec.structs.replace(plain, reply={"role": "assistant", "content": "A countess."})
    failed = msgspec.structs.replace(call, call_id="d", t_arrived=30.0, t_start=0.0, status=502, error="gone", **bare)
    inputs = {"upstream": f"hf:{model}", "format": form or chat.hash, "policy": {"format": "hermes"}}
    with recording(folder, inputs) as recorder:
        for each in (later, plain, call, failed):
            recorder.append(each)
    return folder
