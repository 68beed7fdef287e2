"""Calls as JSON in a message, for chat servers that hold an answer to a schema (`policy.constrained`), whatever the
chat template of the model makes of tools; it takes half the tokens, and a small model without such a template
understands it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness1.env.pieces import Piece, group_messages
from harness1.env.view import ActionView
from harness1.models.calls import Message, change_schemas
from harness1.tools.discovery import MOST_QUERIES
from harness1.tools.documents import END_SEARCH
from harness1.tools.tool import ToolSpec

CHARACTERS = 120  # most characters of a string: with `MOST_QUERIES` of a list, every call ends, within about 200 tokens
EXAMPLES: Mapping[str, tuple[Any, Any]] = {
    "fan_out_search": (
        {"queries": ["painter Ada Holm", "Ada Holm birthplace town"]},
        {"queries": ["Westby", "river through Westby"]},
    ),
    "search_corpus": ({"query": "painter Ada Holm born"}, {"query": "Westby town river"}),
}
"""The calls of the example, by the tool that it shows: the first of these that is offered."""


def write_messages(pieces: Sequence[Piece], specs: Sequence[ToolSpec]) -> list[Message]:
    """Return the messages of a context, with the tools and an example in the first."""
    messages: list[Message] = []
    for group in group_messages(pieces):
        first, text = group[0], "".join(each.text for each in group)
        role = "user" if first.role == "tool" else first.role
        if isinstance(first.shows, ActionView):
            text = write_call(first.shows.call.name, first.shows.call.arguments)
        elif role == "system":
            text = f"{declare(specs)}\n{text}{write_example(specs)}"
        messages.append({"role": role, "content": text})
    return join_roles(messages)


def join_roles(messages: Sequence[Message]) -> list[Message]:
    """Return messages of text of which no two in a row have one role, which some chat templates refuse."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**message, "content": joined[-1]["content"] + message["content"]}
        else:
            joined.append(message)
    return joined


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as a model has to write it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def declare(specs: Sequence[ToolSpec]) -> str:
    """Return what a model is told of the tools: a call of each, and what it does. Small models copy such a call as it
    stands, so that optional words, as of `end_search`, are left out."""
    lines = ["Each of your messages is one call of a tool, as JSON and nothing else:"]
    for spec in specs:
        parts, required = spec.parameters["properties"], spec.parameters["required"]
        shown = {
            name: ["..."] if part.get("type") == "array" else {} if part.get("type") == "object" else "..."
            for name, part in parts.items()
            if name in required or part.get("type") == "array"
        }
        lines.append(f"{write_call(spec.name, shown)}\n  {spec.description.partition('. ')[0].rstrip('.')}.")
    return "\n".join([*lines, ""])


def write_example(specs: Sequence[ToolSpec]) -> str:
    """Return a search in two steps, which tells a small model more than rules do; nothing without a tool for it."""
    name = next((name for name in EXAMPLES if any(spec.name == name for spec in specs)), None)
    if name is None:
        return ""
    first, second = (write_call(name, arguments) for arguments in EXAMPLES[name])
    return (
        "Example. Question: Which river flows through the town where the painter Ada Holm was born?\n"
        f"{first}\nThe documents say that Ada Holm was born in Westby.\n"
        f"{second}\nThe documents say that the river Lund flows through Westby.\n{write_call(END_SEARCH, {})}\n"
    )


def response_format(specs: Sequence[ToolSpec], turn: int) -> dict[str, Any]:
    """Return the schema of one call of these tools. No first turn ends the search, as small models would do."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": spec.name}, "arguments": change_schemas(spec.parameters, _bounded)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for spec in specs
        if turn > 1 or spec.name != END_SEARCH
    ]
    return {"type": "json_schema", "json_schema": {"name": "call", "schema": {"anyOf": calls}}}


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with low bounds of strings and lists, which are checked in a call as they stand."""
    match schema.get("type"):
        case "string":
            return schema | {"maxLength": min(schema.get("maxLength", CHARACTERS), CHARACTERS)}
        case "array":
            return schema | {"maxItems": min(schema.get("maxItems", MOST_QUERIES), MOST_QUERIES)}
        case "object":
            return {name: part for name, part in schema.items() if name != "maxProperties"}
    return schema
