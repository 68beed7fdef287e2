"""Hermes: ChatML with tools as JSON schemas and calls as JSON between `<tool_call>` tags.

The format of NousResearch/Hermes-Function-Calling, which Qwen 2.5 and 3 were also trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from harness1.env.render.pieces import Piece
from harness1.models.backend import Grammar
from harness1.models.formats.chat_format import Ids, Parsed
from harness1.models.formats.chat_messages import tools_of
from harness1.models.formats.chatml import END, ChatML, as_words
from harness1.models.formats.grammar import any_of, arguments_rules, literal, make_grammar
from harness1.models.formats.reading import MOST_CALLS, THINK, THOUGHT, balanced, read_bare, read_call, read_object
from harness1.records import ToolCall
from harness1.tools.tool import ToolSpec

CALL, CALLED = "<tool_call>", "</tool_call>"
_OPENING = re.compile(f"{THINK}|{CALL}")
_FIRST = re.compile(rf"\{{|{CALL}|{CALLED}")
_NEXT = re.compile(r"[\s,]*\{")


class Hermes(ChatML):
    """Reasoning in plain words (or between `<think>` tags), then `<tool_call>{"name": ..., "arguments": ...}`."""

    name = "hermes"
    instruction = f'End with one call: {CALL}\n{{"name": "TOOL", "arguments": {{...}}}}\n{CALLED}'

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
                f'{CALL}\n{{"name": "TOOL", "arguments": {{...}}}}\n{CALLED}'
            ),
        )

    def format_action(self, reasoning: str, action: ToolCall) -> Ids:
        call = json.dumps({"name": action.name, "arguments": action.arguments}, ensure_ascii=False)
        return (
            *self.text(as_words(reasoning)),
            *self.write(f"{CALL}\n"),
            *self.text(f"{call}\n"),
            *self.write(f"{CALLED}{END}"),
        )

    def parse(self, output_ids: Sequence[int], specs: Sequence[ToolSpec]) -> Parsed:
        text = self.said(output_ids)
        reasoning, tags = _divided(text)
        if not tags:
            bare = read_bare(text, {spec.name for spec in specs})
            return Parsed("", bare) if bare else Parsed(reasoning, error="there is no call")
        actions = tuple(call for calls in tags for call in calls)
        error = None if actions else "the call is not an object with a name and arguments"
        return Parsed(reasoning, actions, error)

    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        calls = [
            literal('{"name": "' + spec.name + '", "arguments": ') + f" args_{spec.name} " + literal("}")
            for spec in specs
        ]
        root = f"thought {literal(CALL + chr(10))} ({any_of(calls)}) {literal(chr(10) + CALLED)}"
        return make_grammar(root, arguments_rules(specs))


def _divided(text: str) -> tuple[str, list[list[ToolCall]]]:
    """Return the text before the first call, thoughts included, and the calls of each tag. An unclosed thought extends
    to the end, and text in a thought is never a call."""
    at, words, tags = 0, list[str](), list[list[ToolCall]]()
    while len(tags) < MOST_CALLS:
        tag = _OPENING.search(text, at)
        if not tags:
            words.append(text[at : tag.start() if tag else len(text)])
        if tag is None:
            break
        if tag[0] == CALL:
            calls, at = _called(text, tag.end())
            tags.append(calls)
            continue
        end = text.find(THOUGHT, tag.end())
        at = end + len(THOUGHT) if end >= 0 else len(text)
        if not tags:
            words.append(text[tag.end() : end if end >= 0 else len(text)])
    return "\n".join(filter(None, map(str.strip, words))), tags


def _called(text: str, at: int) -> tuple[list[ToolCall], int]:
    """Return the calls after an opening tag (one object or a list), and the position after the last. Objects are read
    before closing tags are searched, because a string in them may contain one."""
    calls: list[ToolCall] = []
    start = _FIRST.search(text, at)
    if start is None or start[0] != "{":
        return calls, at
    while start and len(calls) < MOST_CALLS and (body := balanced(text, start.end() - 1)) is not None:
        calls += read_call(read_object(body) or {})
        at = start.end() - 1 + len(body)
        start = _NEXT.match(text, at)
    return calls, at
