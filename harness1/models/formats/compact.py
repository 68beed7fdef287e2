"""Compact: ChatML with one-line declarations and calls, for models with small windows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from harness1.models.backend import Grammar
from harness1.models.formats.chat_format import Ids, Parsed
from harness1.models.formats.chatml import END, ChatML, as_words
from harness1.models.formats.grammar import any_of, arguments_rules, literal, make_grammar
from harness1.models.formats.reading import MOST_CALLS, balanced, clean_name, read_bare, read_object, unwrapped
from harness1.records import ToolCall
from harness1.tools.tool import ToolSpec

_LINE = re.compile(
    r"^[ \t>*`-]*(?:(?:action|call|tool)[ \t]*:[ \t]*)?[`\"]?([\w.][\w.-]{0,79})[`\"]?[ \t]*(?:[:(][ \t]*)?(?=\{)",
    re.I | re.M,
)


class Compact(ChatML):
    """Reasoning, then a line `TOOL {arguments}`. A line is a call only if it names an existing tool; an output that is
    a single call as a JSON object counts as well."""

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
        return (*self.text(as_words(reasoning) + call), *self.write(END))

    def parse(self, output_ids: Sequence[int], specs: Sequence[ToolSpec]) -> Parsed:
        text = self.said(output_ids)
        names = {spec.name for spec in specs}
        found = list(_calls(text, names))
        if not found:
            bare = read_bare(text, names)
            return Parsed("", bare) if bare else Parsed(text.strip(), error="there is no call")
        actions = tuple(call for _, name, arguments in found for call in unwrapped(name, arguments))
        reasoning = text[: found[0][0]].strip()
        return Parsed(reasoning, actions) if actions else Parsed(reasoning, error="the call wraps none")

    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        calls = [literal(f"{spec.name} ") + f" args_{spec.name}" for spec in specs]
        return make_grammar(f"thought ({any_of(calls)})", arguments_rules(specs))


def _calls(text: str, names: set[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield each call's position, tool and arguments, ignoring text inside other calls' arguments."""
    lines = ((match, clean_name(match.group(1))) for match in _LINE.finditer(text))
    end = 0
    for match, name in islice((line for line in lines if line[1] in names), MOST_CALLS):
        body = balanced(text, match.end()) if match.start() >= end else None
        if body is None:
            continue
        end = match.end() + len(body)
        if (arguments := read_object(body)) is not None:
            yield match.start(), name, arguments


def _line(spec: ToolSpec) -> str:
    summary = spec.description.split(". ")[0].rstrip(".")
    return f"{_signature(spec)}: {summary}." if summary else _signature(spec)


def _signature(spec: ToolSpec) -> str:
    required = spec.parameters.get("required", ())
    names = [name if name in required else f"{name}?" for name in spec.parameters.get("properties", {})]
    return f"{spec.name} {{{', '.join(names)}}}"
