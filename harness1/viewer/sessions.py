"""The record of a proxy as sessions: the calls of an agent in order, each with what it added to the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import ChatPolicy, Config
from harness1.errors import MALFORMED, ConfigError, UsageError
from harness1.models.open import format_at
from harness1.models.spec import ModelSpec
from harness1.models.tokenizer import Tokenizer
from harness1.rows.proxy_record import CALLS, VERB, RecordedCall, read_records
from harness1.runs.files import Stage, read_stage
from harness1.viewer.page_file import deflated

Sent = Sequence[int] | Sequence[Any]


def is_recording(folder: Path) -> bool:
    """Return True if a folder holds calls that a proxy recorded."""
    if not (folder / CALLS).is_file():
        return False
    stage = read_stage(folder)
    return stage is None or stage.verb == VERB


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Return the sessions of a record as JSON data, in the order of their first calls. Parts that a call lacks are
    None; times are in seconds.

    Raises:
        SchemaError: the record is damaged.
    """
    groups: dict[str, list[RecordedCall]] = {}
    for call in sorted(read_records(folder), key=lambda call: call.t_arrived):
        groups.setdefault(call.session_id, []).append(call)
    stage = read_stage(folder)
    tokenizer = _tokenizer(stage)
    inputs = {} if stage is None else stage.inputs
    about = {"record": folder.resolve().name, "upstream": inputs.get("upstream", "")}
    return [about | {"name": name, "calls": _calls(group, tokenizer)} for name, group in groups.items()]


def held_sessions(folders: Sequence[Path], room: int) -> list[tuple[dict[str, Any], str]]:
    """Return the rows of all sessions of some records, and their data compressed; it is empty where a session does not
    fit into a number of bytes.

    Raises:
        SchemaError: a record is damaged.
    """
    found = []
    for session in (session for folder in folders for session in read_sessions(folder)):
        text = deflated(session)
        held = len(text) <= room
        room -= len(text) if held else 0
        found.append((session_row(session) | {"held": held}, text if held else ""))
    return found


def session_row(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a session in the list of sessions."""
    calls = session["calls"]
    return {
        "name": session["name"],
        "record": session["record"],
        "calls": len(calls),
        "failed": sum(call["error"] is not None for call in calls),
        "tokens": sum(call["output_tokens"] or 0 for call in calls) or None,
        "seconds": sum(call["seconds"] or 0.0 for call in calls),
    }


def _calls(group: Sequence[RecordedCall], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    ids: Sequence[int] = ()
    said: list[Any] = []
    shown = []
    for call in group:
        shown.append(_call(call, ids, said, tokenizer))
        if call.prompt_ids:
            ids = (*call.prompt_ids, *call.output_ids)
        if call.request is not None:
            said = [*_messages(call), *([call.reply] if call.reply else [])]
    return shown


def _call(call: RecordedCall, ids: Sequence[int], said: Sequence[Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a call, of whose prompt only what follows the tokens or messages of the one before is written out."""

    def text(tokens: Sequence[int]) -> str | None:
        return tokenizer.decode(tokens) if tokenizer is not None and tokens else None

    messages = _messages(call)
    kept_ids, kept = _common(ids, call.prompt_ids), _common(said, messages)
    logprobs = call.output_logprobs
    return {
        "status": call.status,
        "error": call.error,
        "untrainable": call.untrainable,
        "attempt": call.attempt,
        "agent": call.agent_id,
        "model": call.model,
        "dialect": call.dialect,
        "reused": kept_ids or None,
        "prompt": text(call.prompt_ids[kept_ids:]),
        "prompt_tokens": len(call.prompt_ids) or None,
        "earlier": kept,
        "messages": messages[kept:],
        "reply": call.reply,
        "output": text(call.output_ids),
        "output_tokens": len(call.output_ids) or None,
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "actions": msgspec.to_builtins(call.actions),
        "finish": call.finish_reason,
        "versions": [call.version_start, call.version_end] if call.output_ids else None,
        "waited": round(call.t_start - call.t_arrived, 3) if call.t_start else None,
        "seconds": round(call.t_end - call.t_start, 3) if call.t_start else None,
    }


def _messages(call: RecordedCall) -> list[Any]:
    found = (call.request or {}).get("messages")
    return found if isinstance(found, list) else []


def _common(before: Sent, now: Sent) -> int:
    """Return the length of the beginning that two sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))


def _tokenizer(stage: Stage | None) -> Tokenizer | None:
    """Return the tokenizer of a recorded model, or None if there is none or it is not on this machine."""
    if stage is None or "format" not in stage.inputs:
        return None
    try:
        policy = msgspec.convert(stage.inputs["policy"], ChatPolicy)
        chat = format_at(ModelSpec.read(str(stage.inputs["upstream"])).model, Config(policy=policy))
    except (KeyError, UsageError, ConfigError, OSError, *MALFORMED):
        return None
    return chat.tokenizer if chat.hash == stage.inputs["format"] else None
