"""The chat formats, and how to open one by its name; a plugin names its class in `harness1.formats`.

ChatML is the message frame of Qwen, SmolLM and many others; Hermes that of NousResearch/Hermes-Function-Calling, which
Qwen 2.5 and 3 were trained on too; Harmony that of gpt-oss (https://github.com/openai/harmony): tests compare it with
`openai-harmony`, whose parser raises on unexpected tokens, while this one reads any sequence of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from harness1.env.pieces import Piece
from harness1.env.view import TurnView
from harness1.errors import ConfigError, UsageError
from harness1.models.backend import Grammar
from harness1.models.calls import (
    LONGEST,
    MOST_CALLS,
    THINK,
    THOUGHT,
    clean_name,
    find_object,
    read_bare,
    read_call,
    read_object,
    tools_of,
    unwrap_calls,
)
from harness1.models.chat_format import ChatFormat, Ids, Parsed
from harness1.models.grammar import arguments_rules, literal, make_grammar
from harness1.models.tokenizer import Tokenizer
from harness1.plain import meant
from harness1.plugins import find_plugin, plugin_names, unfit
from harness1.records import ToolCall
from harness1.tools.tool import ToolSpec

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
_BRACKETS = str.maketrans("{}<>", "()()")


class ChatML(ChatFormat):
    """A base class of formats whose messages are ChatML."""

    control = (IM_START, IM_END)

    @property
    def stop_ids(self) -> Ids:
        return (self.tokenizer.control[IM_END],)

    def opening(self, first: Piece) -> str:
        role = "user" if first.role == "tool" else first.role
        return f"{IM_START}{role}\n"

    def closing(self, first: Piece) -> str:
        return "\n" if first.turn_ref is not None else f"{IM_END}\n"

    def generation_prompt(self) -> str:
        return f"{IM_START}assistant\n"

    def said(self, output_ids: Sequence[int]) -> str:
        stops = self.stop_ids
        end = next((place for place, token in enumerate(output_ids) if token in stops), len(output_ids))
        return self.tokenizer.decode(output_ids[:end])[:LONGEST]


def _as_words(reasoning: str) -> str:
    """Return reasoning as one line without the brackets of calls and tags, or nothing if it is empty. With brackets, a
    call that is only mentioned would be carried out, and an unclosed thought would swallow the call."""
    words = " ".join(reasoning.translate(_BRACKETS).split())
    return f"{words}\n" if words else ""


_LINE = re.compile(
    r"^[ \t>*`-]*(?:(?:action|call|tool)[ \t]*:[ \t]*)?[`\"]?([\w.][\w.-]{0,79})[`\"]?[ \t]*(?:[:(][ \t]*)?(?=\{)",
    re.I | re.M,
)


class Compact(ChatML):
    """Reasoning, then a line `TOOL {arguments}` of an existing tool; a single call as a JSON object counts as well."""

    name = "compact"
    instruction = "End with one line: TOOL {arguments as JSON}"

    def declarations(self, specs: Sequence[ToolSpec]) -> Ids:
        lines = "\n".join(map(_line, specs))
        return self.text(
            "Tools:\n" + lines + "\nThink in one sentence, then write one line: TOOL {arguments as JSON}, such as\n"
            'search_corpus {"query": "..."}\n'
        )

    def format_action(self, reasoning: str, action: ToolCall) -> Ids:
        call = f"{action.name} {json.dumps(action.arguments, ensure_ascii=False)}"
        return (*self.text(_as_words(reasoning) + call), *self.write(IM_END))

    def parse(self, output_ids: Sequence[int], specs: Sequence[ToolSpec]) -> Parsed:
        text = self.said(output_ids)
        names = {spec.name for spec in specs}
        found = list(_calls(text, names))
        if not found:
            bare = read_bare(text, names)
            return Parsed("", bare) if bare else Parsed(text.strip(), error="there is no call")
        actions = tuple(call for _, name, arguments in found for call in unwrap_calls(name, arguments))
        reasoning = text[: found[0][0]].strip()
        return Parsed(reasoning, actions) if actions else Parsed(reasoning, error="the call wraps none")

    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        calls = [literal(f"{spec.name} ") + f" args_{spec.name}" for spec in specs]
        return make_grammar(f"thought ({' | '.join(calls)})", arguments_rules(specs))


def _calls(text: str, names: set[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield each call's position, tool and arguments, ignoring text inside other calls' arguments."""
    lines = ((match, clean_name(match.group(1))) for match in _LINE.finditer(text))
    end = 0
    for match, name in islice((line for line in lines if line[1] in names), MOST_CALLS):
        body = find_object(text, match.end()) if match.start() >= end else None
        if body is None:
            continue
        end = match.end() + len(body)
        if (arguments := read_object(body)) is not None:
            yield match.start(), name, arguments


def _line(spec: ToolSpec) -> str:
    required, summary = spec.parameters.get("required", ()), spec.description.split(". ")[0].rstrip(".")
    names = [name if name in required else f"{name}?" for name in spec.parameters.get("properties", {})]
    return f"{spec.name} {{{', '.join(names)}}}" + (f": {summary}." if summary else "")


TAG, TAG_END = "<tool_call>", "</tool_call>"
_OPENING = re.compile(f"{THINK}|{TAG}")
_FIRST = re.compile(rf"\{{|{TAG}|{TAG_END}")
_NEXT = re.compile(r"[\s,]*\{")


class Hermes(ChatML):
    """Reasoning in plain words (or between `<think>` tags), then `<tool_call>{"name": ..., "arguments": ...}`."""

    name = "hermes"
    instruction = f'End with one call: {TAG}\n{{"name": "TOOL", "arguments": {{...}}}}\n{TAG_END}'

    def opening(self, first: Piece) -> str:
        return super().opening(first) + ("<tool_response>\n" if first.role == "tool" else "")

    def closing(self, first: Piece) -> str:
        return ("</tool_response>" if first.role == "tool" else "") + super().closing(first)

    def declarations(self, specs: Sequence[ToolSpec]) -> Ids:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools_of(specs))
        return (
            *self.write("# Tools\n\nThe tools that you can call, as JSON schemas:\n<tools>\n"),
            *self.text(f"{listed}\n"),
            *self.write(
                "</tools>\n\nThink briefly, then call one tool: its name and arguments as JSON between tags:\n"
                f'{TAG}\n{{"name": "TOOL", "arguments": {{...}}}}\n{TAG_END}'
            ),
        )

    def format_action(self, reasoning: str, action: ToolCall) -> Ids:
        call = json.dumps({"name": action.name, "arguments": action.arguments}, ensure_ascii=False)
        return (
            *self.text(_as_words(reasoning)),
            *self.write(f"{TAG}\n"),
            *self.text(f"{call}\n"),
            *self.write(f"{TAG_END}{IM_END}"),
        )

    def parse(self, output_ids: Sequence[int], specs: Sequence[ToolSpec]) -> Parsed:
        text = self.said(output_ids)
        reasoning, tags = _divide(text)
        if not tags:
            bare = read_bare(text, {spec.name for spec in specs})
            return Parsed("", bare) if bare else Parsed(reasoning, error="there is no call")
        actions = tuple(call for calls in tags for call in calls)
        error = None if actions else "the call is not an object with a name and arguments"
        return Parsed(reasoning, actions, error)

    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        named = [(spec.name, literal('{"name": "' + spec.name + '", "arguments": ')) for spec in specs]
        calls = [f"{begin} args_{name} {literal('}')}" for name, begin in named]
        root = f"thought {literal(TAG + chr(10))} ({' | '.join(calls)}) {literal(chr(10) + TAG_END)}"
        return make_grammar(root, arguments_rules(specs))


def _divide(text: str) -> tuple[str, list[list[ToolCall]]]:
    """Return the text before the first call, and the calls of each tag; text in a thought is never a call."""
    at, words, tags = 0, list[str](), list[list[ToolCall]]()
    while len(tags) < MOST_CALLS:
        tag = _OPENING.search(text, at)
        if not tags:
            words.append(text[at : tag.start() if tag else len(text)])
        if tag is None:
            break
        if tag[0] == TAG:
            calls, at = _read_tag(text, tag.end())
            tags.append(calls)
            continue
        end = text.find(THOUGHT, tag.end())
        at = end + len(THOUGHT) if end >= 0 else len(text)
        if not tags:
            words.append(text[tag.end() : end if end >= 0 else len(text)])
    return "\n".join(filter(None, map(str.strip, words))), tags


def _read_tag(text: str, at: int) -> tuple[list[ToolCall], int]:
    """Return the calls after a tag, and where they end. A string in them may contain a closing tag."""
    calls: list[ToolCall] = []
    start = _FIRST.search(text, at)
    if start is None or start[0] != "{":
        return calls, at
    while start and len(calls) < MOST_CALLS and (body := find_object(text, start.end() - 1)) is not None:
        calls += read_call(read_object(body) or {})
        at = start.end() - 1 + len(body)
        start = _NEXT.match(text, at)
    return calls, at


START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

PREAMBLE = f"""{START}system{MESSAGE}You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2026-04-01

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.{END}"""
"""The system message that the models know; its date is fixed (spec 3.1), or prompts would change every day."""

_MARKS = {name: chr(0xD800 + at) for at, name in enumerate((START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN))}
_UNMARKED = {ord(mark): name for name, mark in _MARKS.items()}
_ENDS = re.compile("|".join(_MARKS[name] for name in (START, END, CALL, RETURN)))
_ANY_MARK = re.compile("[\ud800-\udfff]")
_CHANNELS = re.compile(rf"{_MARKS[CHANNEL]}\s*([^\s\ud800-\udfff]*)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}")


class Harmony(ChatFormat):
    """A chat format with reasoning on the channel `analysis` and calls as commentary to `functions.NAME`."""

    name = "harmony"
    instruction = "Call one of the functions: commentary to=functions.NAME, with its arguments as JSON"
    control = tuple(_MARKS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._marks = {tokenizer.control[name]: mark for name, mark in _MARKS.items()}

    @property
    def stop_ids(self) -> Ids:
        return (self.tokenizer.control[CALL], self.tokenizer.control[RETURN])

    def opening(self, first: Piece) -> str:
        match first.role:
            case "system":
                return f"{PREAMBLE}{START}developer{MESSAGE}# Instructions\n\n"
            case "tool":
                name = first.shows.tool if isinstance(first.shows, TurnView) else ""
                name = name if _PLAIN_NAME.fullmatch(name) else "unknown"  # a policy may have made it up
                return f"{START}functions.{name} to=assistant{CHANNEL}commentary{MESSAGE}"
            case "assistant":
                return f"{START}assistant"
        return f"{START}{first.role}{MESSAGE}"

    def closing(self, first: Piece) -> str:
        return "" if first.turn_ref is not None else END

    def generation_prompt(self) -> str:
        return f"{START}assistant"

    def write_piece(self, piece: Piece) -> str:
        """Such vocabularies have one token for a full stop and newlines, so the empty line ends the instructions."""
        return piece.text + "\n" * (piece.role == "system")

    def declarations(self, specs: Sequence[ToolSpec]) -> Ids:
        types = "\n".join(f"{_comment(spec.description)}type {spec.name} = {_parameters(spec)};\n" for spec in specs)
        return self.text(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{types}\n}} // namespace functions")

    def format_action(self, reasoning: str, action: ToolCall) -> Ids:
        words = reasoning.strip()
        begin, end = self.write(f"{CHANNEL}analysis{MESSAGE}"), self.write(f"{END}{START}assistant")
        return (
            *((*begin, *self.text(words), *end) if words else ()),
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
                actions += unwrap_calls(clean_name(recipient.group(1)), arguments)
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
        """Yield header, channel and text of each message. Meanwhile each control token is a lone surrogate."""
        marked = "".join(
            "".join(map(self._marks.__getitem__, run)) if is_control else self.tokenizer.decode([*run])
            for is_control, run in groupby(output_ids, self._marks.__contains__)
        )
        for message in _ENDS.split(marked):
            header, begins, text = message.partition(_MARKS[MESSAGE])
            if begins:
                channels = _CHANNELS.findall(header)
                yield _ANY_MARK.sub(" ", header), channels[-1] if channels else "", text.translate(_UNMARKED)


def _parameters(spec: ToolSpec) -> str:
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


FORMATS: dict[str, type[ChatFormat]] = {"hermes": Hermes, "harmony": Harmony, "compact": Compact}


def open_format(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a name; `auto` chooses by the tokenizer's control tokens. Raise UsageError if none fits."""
    if name == "auto":
        known = {CHANNEL: Harmony.name, IM_START: Hermes.name}
        name = next((known[token] for token in known if token in tokenizer.control), name)
    found: type[ChatFormat] | None = find_plugin("formats", name, FORMATS)
    if found is not None and not (isinstance(found, type) and issubclass(found, ChatFormat) and found.name == name):
        raise unfit("formats", name, "must be a subclass of ChatFormat of that name")
    if found is None and name not in FORMATS:
        names = (*FORMATS, *plugin_names("formats"))
        if name == "auto":
            raise ConfigError(f"policy.format=auto has no format for this tokenizer: choose {', '.join(names)}")
        raise ConfigError(f"unknown format {name!r}: choose {', '.join(names)}{meant(name, names)}")
    return (found or FORMATS[name])(tokenizer)
