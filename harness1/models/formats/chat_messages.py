"""Contexts as messages of OpenAI's chat completions, for models that take text rather than token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness1.env.render.pieces import Piece, grouped
from harness1.env.render.view import ActionView
from harness1.records import Record
from harness1.tools.tool import ToolSpec

NOT_EXECUTED = "Not executed: one action per turn.\n"

Message = dict[str, Any]


class Said(Record):
    """An assistant's message as its server sent it. It is sent back unchanged, because servers that store sampled
    outputs recognise it by the ids of its calls."""

    message: Message
    call_ids: tuple[str, ...]
    executed: str
    """The id of the call that was carried out."""


def messages_of(pieces: Sequence[Piece], said: Mapping[int, Said]) -> list[Message]:
    """Return the messages of a context; `said` holds the model's own messages by turn, where known."""
    messages: list[Message] = []
    answering: Said | None = None
    for group in grouped(pieces):
        first, text = group[0], "".join(each.text for each in group)
        if first.turn_ref is not None:
            answering = said.get(first.turn_ref) or _restated(first)
            messages.append(answering.message if answering else {"role": "assistant", "content": text})
        elif first.role == "tool" and answering is not None:
            messages += [
                {"role": "tool", "tool_call_id": name, "content": text if name == answering.executed else NOT_EXECUTED}
                for name in answering.call_ids
            ]
            answering = None
        else:
            messages.append({"role": "user" if first.role == "tool" else first.role, "content": text})
    return messages


def tools_of(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return tools as OpenAI function declarations."""
    return [{"type": "function", "function": msgspec.to_builtins(spec)} for spec in specs]


def _restated(piece: Piece) -> Said | None:
    """Return the call of a turn taken by another policy, as a message."""
    if not isinstance(piece.shows, ActionView):
        return None
    call, call_id = piece.shows.call, f"turn-{piece.turn_ref}"
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return Said({"role": "assistant", "content": None, "tool_calls": calls}, (call_id,), call_id)
