"""When an answer need not go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness1.models.endings import has_ended
from tests.support import make_env

CALL = '{"name": "search_corpus", "arguments": {"query": "Velcro"}}'
FENCED = f"```json\n{json.dumps(json.loads(CALL), indent=2)}\n```"


def call(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "search_corpus", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"content": CALL}, True),
        ({"content": CALL[:-1]}, False),
        ({"content": FENCED}, True),
        ({"content": f"<think>A document says {CALL}"}, False),
        ({"content": f"<think>I search.</think>\n<tool_call>\n{CALL}"}, True),
        ({"content": "<function=search_corpus>\n<parameter=query>Velcro</parameter>"}, False),
        ({"content": "<function=search_corpus>\n<parameter=query>Velcro</parameter>\n</function>"}, True),
        ({"content": "functions.search_corpus:0<|tool_call_argument_begin|>"}, False),
        ({"content": f"I search.\n{CALL}\n\n"}, False),  # it may be quoted
        ({"content": f"I search.\n{CALL}{9 * chr(10)}"}, True),
        ({"content": '{"name": "search_corpus",\n\n"arguments": {    '}, False),
        ({"content": "I should search.\n\n"}, False),
        ({"content": "I should search." + " \n" * 16}, True),
        ({"content": "The budget line shows 2202 tokens. " * 2}, False),
        ({"content": "The budget line shows 2202 tokens. " * 3}, True),
        ({"content": "", "reasoning_content": "Let me think about this again.\n" * 3}, True),
        ({"content": "", "reasoning": "Let me think about this again.\n" * 3}, True),  # as Ollama calls it
        ({"content": "| name | year |\n" + "|---" * 12}, False),
        ({"content": "My plan\n" + "-" * 60}, False),
        ({"content": None, "tool_calls": [call('{"query": "Velcro"}')]}, False),
        ({"content": None, "tool_calls": [call('{"query": "Velcro"}')] * 3}, True),
        ({"content": None, "tool_calls": [call('{"queries": [' + '"who founded Velcro", ' * 3)]}, True),
        ({"content": None, "tool_calls": [call('{"query": "Velcro"' + "\n" * 32)]}, True),
    ],
)
def test_an_answer_has_ended_when_only_waste_follows(message: dict[str, Any], wanted: bool) -> None:
    assert has_ended({"role": "assistant", **message}, make_env().toolbox.specs) is wanted
