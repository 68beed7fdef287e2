"""Calls in text, read tolerantly where the meaning is clear, in bounded time; and contexts as OpenAI's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from harness1.env.pieces import Piece, group_messages
from harness1.env.view import ActionView
from harness1.errors import MALFORMED
from harness1.records import Record, ToolCall
from harness1.tools.tool import ToolSpec

LONGEST = 100_000  # most characters of an output that are read; no valid call is longer
MOST_CALLS = 64  # most calls of an output that are read; only one is carried out, so no policy needs more
THINK, THOUGHT = "<think>", "</think>"  # tags that models put around their thoughts
WRAPPERS = ("multi_tool_use", "multi_tool_use.parallel", "parallel")
"""Names under which models wrap several calls into one."""
_LIMITS = ("maxLength", "maxItems", "maxProperties")
_MARKER = re.compile(r"<\|[^|<>]*\|>")
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*'
_BRACES = re.compile(rf'{_STRING}"?|[{{}}]', re.DOTALL)
_ESCAPES = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})|\\")
_COMMAS = re.compile(rf'({_STRING}")|,(?=\s*[}}\]])', re.DOTALL)
_CONTROL = re.compile(
    r"""(?x) (?: < (?= [|｜] [^<>]{1,64} [|｜] >
                   | /? (?: tool_call | tool_calls | tool_response | tools | think | function | parameter
                          | start_of_turn | end_of_turn | im_start | im_end | system | bos | eos | s
                          | arg_key | arg_value | minimax:tool_call | end_of_utterance )
                     \b [^<>]{0,64} > )
           | \[ (?= /? (?: INST | SYS | TOOL_CALLS | TOOL_RESULTS | AVAILABLE_TOOLS | THINK
                          | SYSTEM_PROMPT | MODEL_SETTINGS | TOOL_CONTENT | CALL_ID | ARGS ) \] ) )"""
)
"""The first character of a control token: ChatML, Harmony, Llama, DeepSeek, Kimi, Qwen, Gemma, Mistral, GLM, MiniMax,
SmolVLM."""


def read_object(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in a text, mended where its meaning is clear (spec 2.5); None if there is none."""
    for candidate in _candidates(text[:LONGEST].strip()):
        try:
            found = json.loads(candidate, strict=False, parse_constant=_refuse)
        except MALFORMED:
            continue
        if isinstance(found, dict):
            return found
    return None


def find_object(text: str, start: int = 0) -> str | None:
    """Return the text from the first `{` at or after `start` to its closing brace, ignoring braces in strings."""
    begin = text.find("{", start)
    depth = 0
    for token in _BRACES.finditer(text, begin) if begin >= 0 else ():
        if token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
            if not depth:
                return text[begin : token.end()]
    return None


def clean_name(name: str) -> str:
    """Strip the prefix, quotes and marker tokens that models put around the name of a tool."""
    stretches = [stretch.strip(" \t\r\n\"'`:") for stretch in _MARKER.split(name)]
    return next((stretch for stretch in stretches if stretch), "").removeprefix("functions.")


def read_call(found: dict[str, Any]) -> tuple[ToolCall, ...]:
    """Return the calls that an object of name and arguments expresses; none if it is not such an object."""
    call = _read_named(found)
    return unwrap_calls(call.name, call.arguments) if call else ()


def read_bare(text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    """Return the calls of an output that is one JSON object, fenced or not, after at most a thought; of these tools."""
    body = (text.partition(THOUGHT)[2] if text.lstrip().startswith(THINK) else text).strip()
    body = body.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    found = read_object(body) if body.startswith("{") and find_object(body) == body else None
    return tuple(call for call in read_call(found or {}) if call.name in names)


def unwrap_calls(name: str, arguments: dict[str, Any]) -> tuple[ToolCall, ...]:
    """Return one call, or the calls that it wraps; nested wrappers are ignored."""
    if name not in WRAPPERS:
        return (ToolCall(name, arguments),) if name else ()
    inner = arguments.get("tool_calls", arguments.get("tool_uses"))
    calls = [_read_named(each) for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []
    return tuple(call for call in calls[:MOST_CALLS] if call and call.name not in WRAPPERS)


def _read_named(found: dict[str, Any]) -> ToolCall | None:
    name = found.get("name", found.get("tool_name", found.get("recipient_name")))
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    if isinstance(name, str) and isinstance(arguments, dict) and (name := clean_name(name)):
        return ToolCall(name, arguments)
    return None


def _candidates(text: str) -> Iterator[str]:
    yield text
    if body := find_object(text):
        yield body
        mended = _ESCAPES.sub(lambda found: found[0] if len(found[0]) > 1 else r"\\", body)
        yield _COMMAS.sub(lambda found: found[1] or "", mended)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant}, which Python reads, is not JSON")


NOT_EXECUTED = "Not executed: one action per turn.\n"
Message = dict[str, Any]


class Said(Record):
    """An assistant's message, sent back unchanged: servers that store outputs know it by the ids of its calls."""

    message: Message
    call_ids: tuple[str, ...]
    executed: str  # the id of the call that was carried out


def messages_of(pieces: Sequence[Piece], said: Mapping[int, Said]) -> list[Message]:
    """Return the messages of a context; `said` holds the model's own messages by turn, where known."""
    messages: list[Message] = []
    answering: Said | None = None
    for group in group_messages(pieces):
        first, text = group[0], "".join(each.text for each in group)
        if first.turn_ref is not None:
            answering = said.get(first.turn_ref) or _restate(first)
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


def without_controls(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a server that may read control tokens in text: broken up in what users and tools say."""
    outside = ("user", "tool")
    return [
        each | {"content": break_controls(each["content"])} if each["role"] in outside else each for each in messages
    ]


def break_controls(text: str) -> str:
    """Return a text with a space inside each spelling of a control token: `< |im_end|>`."""
    return _CONTROL.sub(r"\g<0> ", text)


def tools_of(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return tools as OpenAI function declarations."""
    return [{"type": "function", "function": msgspec.to_builtins(spec)} for spec in specs]


def change_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema in which every object is changed, those within others first."""
    if isinstance(schema, list):
        return [change_schemas(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return change({name: change_schemas(part, change) for name, part in schema.items()})


def without_limits(schema: Any) -> Any:
    """Return a schema without the most that it allows, which is checked in a call anyway: llama.cpp refuses a request
    whose schemas need as long a grammar as 256 handles of 500 characters do."""

    def unlimited(found: dict[str, Any]) -> dict[str, Any]:
        # A parameter may have such a name too; what it stands for is a schema, and no number.
        return {name: part for name, part in found.items() if name not in _LIMITS or not isinstance(part, int)}

    return change_schemas(schema, unlimited)


def _restate(piece: Piece) -> Said | None:
    """Return the call of a turn taken by another policy, as a message."""
    if not isinstance(piece.shows, ActionView):
        return None
    call, call_id = piece.shows.call, f"turn-{piece.turn_ref}"
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return Said({"role": "assistant", "content": None, "tool_calls": calls}, (call_id,), call_id)
