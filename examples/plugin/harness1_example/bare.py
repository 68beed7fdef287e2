"""A chat format: ChatML, and an output is the name of a tool, a space, and its arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harness1.models.backend import Grammar
from harness1.models.calls import read_object
from harness1.models.chat_format import Ids, Parsed
from harness1.models.formats import IM_END, ChatML
from harness1.models.grammar import arguments_rules, literal, make_grammar
from harness1.records import ToolCall
from harness1.tools.tool import ToolSpec


class Bare(ChatML):
    """The format of the guide, chosen by `policy.format=bare`."""

    name = "bare"
    instruction = "Write a tool and its arguments"

    def declarations(self, specs: Sequence[ToolSpec]) -> Ids:
        return self.text("Tools: " + ", ".join(spec.name for spec in specs) + "\n")

    def format_action(self, reasoning: str, action: ToolCall) -> Ids:
        return (*self.text(f"{action.name} {json.dumps(action.arguments)}"), *self.write(IM_END))

    def parse(self, output_ids: Sequence[int], specs: Sequence[ToolSpec]) -> Parsed:
        name, _, rest = self.said(output_ids).strip().partition(" ")
        arguments = read_object(rest)
        if arguments is None or name not in {spec.name for spec in specs}:
            return Parsed(error="there is no call")
        return Parsed(actions=(ToolCall(name, arguments),))

    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        calls = " | ".join(literal(f"{spec.name} ") + f" args_{spec.name}" for spec in specs)
        return make_grammar(calls, arguments_rules(specs))
