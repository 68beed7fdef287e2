"""Harmony, the format of gpt-oss: channels, recipients, and tools as TypeScript signatures.

Source: https://github.com/openai/harmony; tests compare this file with `openai-harmony`. The library's parser raises on
unexpected tokens; this one reads any sequence of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness1.env.render.pieces import Piece
from harness1.env.render.view import TurnView
from harness1.errors import UsageError
from harness1.models.backend import Grammar
from harness1.models.formats.chat_format import ChatFormat, Ids, Parsed
from harness1.models.formats.reading import clean_name, read_object, unwrapped
from harness1.models.tokenizer import Tokenizer
from harness1.records import ToolCall
from harness1.tools.tool import ToolSpec

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

PREAMBLE = f"""{START}system{MESSAGE}You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2026-04-01

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.{END}"""
"""The system message that the models know; its date is fixed (spec 3.1), or prompts would change every day."""

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}")


class Harmony(ChatFormat):
    """A chat format with reasoning on the channel `analysis` and calls as commentary to `functions.NAME`."""

    name = "harmony"
    instruction = "Call one of the functions: commentary to=functions.NAME, with its arguments as JSON"
    control = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._names = {tokenizer.control[name]: name for name in self.control}

    @property
    def stop_ids(self) -> Ids:
        return (self.tokenizer.control[CALL], self.tokenizer.control[RETURN])

    def opening(self, first: Piece) -> str:
        match first.role:
            case "system":
                return f"{PREAMBLE}{START}developer{MESSAGE}# Instructions\n\n"
            case "tool":
                return f"{START}functions.{_tool(first)} to=assistant{CHANNEL}commentary{MESSAGE}"
            case "assistant":
                return f"{START}assistant"
        return f"{START}{first.role}{MESSAGE}"

    def closing(self, first: Piece) -> str:
        return "" if first.turn_ref is not None else END

    def generation_prompt(self) -> str:
        return f"{START}assistant"

    def written(self, piece: Piece) -> str:
        """End the instructions with an empty line rather than begin the tools with it: vocabularies of this kind have
        one token for a full stop and the newlines after it."""
        return piece.text + "\n" * (piece.role == "system")

    def declarations(self, specs: Sequence[ToolSpec]) -> Ids:
        types = "\n".join(f"{_comment(spec.description)}type {spec.name} = {_signature(spec)};\n" for spec in specs)
        return self.text(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{types}\n}} // namespace functions")

    def format_action(self, reasoning: str, action: ToolCall) -> Ids:
        thought: Ids = ()
        if reasoning.strip():
            thought = (
                *self.write(f"{CHANNEL}analysis{MESSAGE}"),
                *self.text(reasoning.strip()),
                *self.write(f"{END}{START}assistant"),
            )
        return (
            *thought,
            *self.text(f" to=functions.{action.name}"),
            *self.write(f"{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}"),
            *self.text(json.dumps(action.arguments, ensure_ascii=False)),
            *self.write(CALL),
        )

    def parse(self, output_ids: Sequence[int], specs: Sequence[ToolSpec]) -> Parsed:
        thoughts: list[str] = []
        actions: list[ToolCall] = []
        for header, channel, text in self._messages(output_ids):
            recipient = _RECIPIENT.search(header)
            if recipient is not None and recipient.group(1) != "assistant":
                arguments = read_object(text)
                if arguments is None:
                    return Parsed(" ".join(thoughts), error="the arguments are not a JSON object")
                actions += unwrapped(clean_name(recipient.group(1)), arguments)
            elif channel in ("", "analysis"):
                thoughts.append(text.strip())
            elif channel not in ("commentary", "final"):
                return Parsed(" ".join(thoughts), error="the channel is none of analysis, commentary and final")
        reasoning = "\n".join(thoughts)
        if len(thoughts) > 1:
            return Parsed(reasoning, error="there are two messages of reasoning")
        named = tuple(call for call in actions if call.name)
        return Parsed(reasoning, named) if named else Parsed(reasoning, error="there is no call")

    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        """Raise `UsageError`: a grammar cannot admit the format's control tokens, which are not text."""
        raise UsageError("policy.constrained is not offered with the harmony format")

    def _messages(self, output_ids: Sequence[int]) -> Iterator[tuple[str, str, str]]:
        """Yield the header, channel and text of each message of an output, ignoring headers without a text."""
        header, channel, text = list[str](), "", None
        for name, stretch in self._stretches(output_ids):
            if name in (START, END, CALL, RETURN):
                if text is not None:
                    yield " ".join(header), channel, text
                header, channel, text = [stretch], "", None
            elif text is not None:
                text += name + stretch
            elif name == MESSAGE:
                text = stretch
            else:
                header.append(stretch)
                if name == CHANNEL:
                    channel = next(iter(stretch.split()), "")
        if text is not None:
            yield " ".join(header), channel, text

    def _stretches(self, output_ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Yield each control token with the text after it; the output continues from `<|start|>assistant`."""
        name, pending = START, list[int]()
        for token in output_ids:
            if token in self._names:
                yield name, self.tokenizer.decode(pending)
                name, pending = self._names[token], []
            else:
                pending.append(token)
        yield name, self.tokenizer.decode(pending)


def _tool(first: Piece) -> str:
    """Return the name of the tool that answers, or `unknown` for a name that a policy made up."""
    name = first.shows.tool if isinstance(first.shows, TurnView) else ""
    return name if _PLAIN_NAME.fullmatch(name) else "unknown"


def _signature(spec: ToolSpec) -> str:
    properties: Mapping[str, Mapping[str, Any]] = spec.parameters.get("properties", {})
    if not properties:
        return "() => any"
    required = spec.parameters.get("required", ())
    lines = []
    for name, inner in properties.items():
        schema = inner if isinstance(inner, dict) else {}
        mark = "" if name in required else "?"
        default = f" // default: {json.dumps(schema['default'], ensure_ascii=False)}" if "default" in schema else ""
        lines.append(f"{_comment(schema.get('description', ''))}{name}{mark}: {_type(schema)},{default}")
    return "(_: {\n" + "\n".join(lines) + "\n}) => any"


def _comment(text: str) -> str:
    return "".join(f"// {line}\n" for line in text.splitlines())


def _type(schema: Any) -> str:
    """Return a JSON schema as a TypeScript type, `any` if it cannot be expressed."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("enum"), list):
        return " | ".join(json.dumps(each) for each in schema["enum"])
    match schema.get("type"):
        case list() as types:
            return " | ".join(_type({**schema, "type": each}) for each in types)
        case "array":
            return f"{_type(schema.get('items'))}[]"
        case "object" if isinstance(schema.get("properties"), dict):
            fields = (f"{name}: {_type(inner)}" for name, inner in schema["properties"].items())
            return f"{{ {', '.join(fields)} }}"
        case "object":
            return f"{{ [key: string]: {_type(schema.get('additionalProperties'))} }}"
        case "integer" | "number":
            return "number"
        case "string" | "boolean" | "null" as name:
            return str(name)
    return "any"
