"""Calls in the text of a message: a table of the shapes in which models write them, each with the report that shows it,
of texts that are none, and of messages drawn at random."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from harness1.models.calls import MOST_CALLS
from harness1.models.dialects import Reading, decode_arguments, fit_arguments, read_calls
from harness1.records import ToolCall
from tests.models.writing import SPECS, draw
from tests.support import call, search

RIVER, END = search("river"), call("end_search")
ADD = call("curate", add_ids=["D1", "D2"])
TAGGED = call("curate", add_ids=["D1"], importance={"D1": "high"})
BODY = '{"name": "search_corpus", "arguments": {"query": "river"}}'
LLAMA = '{"name": "search_corpus", "parameters": {"query": "river"}}'
QWEN = "<function=search_corpus>\n<parameter=query>\nriver\n</parameter>\n</function>"
KIMI = "<|tool_call_begin|>functions.search_corpus:0<|tool_call_argument_begin|>"
KIMI += '{"query": "river"}<|tool_call_end|>'
SPACED = KIMI.replace(">func", ">\nfunc").replace(">{", ">\n{")
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DEEP = '<｜tool▁call▁begin｜>search_corpus<｜tool▁sep｜>{"query": "river"}<｜tool▁call▁end｜>'
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
TO = "<|channel|>commentary to=functions.search_corpus <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Look for it.<|end|><|start|>assistant"
ARGS = '{"query": "river"}'
PAIR = "<arg_key>query</arg_key>\n<arg_value>river</arg_value>"
INVOKE = '<invoke name="search_corpus">\n<parameter name="query">river</parameter>\n</invoke>'
DSML = INVOKE.replace("</", "</｜DSML｜").replace("<in", "<｜DSML｜in").replace("<pa", "<｜DSML｜pa")

CASES: list[tuple[str, str, str, tuple[ToolCall, ...]]] = [
    # dialect, report, text, calls
    ("hermes", "vllm-project/vllm#18791", f"I look for it.\n\n<tool_call>\n{BODY}\n</tool_call>", (RIVER,)),
    ("hermes", "ROCm/ATOM#1427", f"<tool_call>\n{BODY}", (RIVER,)),
    ("hermes", "vllm-project/vllm#22885", f"<tool_call>\n{BODY[:-1]}\n</tool_call>", (RIVER,)),
    ("hermes", "kekzl/imp#1716", f"<tool_call>{BODY}</tool_call><|im_end|>", (RIVER,)),
    ("hermes", "sgl-project/sglang#7863",
     BODY.replace(ARGS, json.dumps(json.dumps(json.dumps(json.loads(ARGS))))), (RIVER,)),
    ("hermes", "NousResearch/Hermes-Function-Calling: the prompt writes calls so",
     "<tool_call>\n{'arguments': {'query': 'river'}, 'name': "
     "'search_corpus'}\n</tool_call>", (RIVER,)),
    ("hermes", "Lexus2016/hermes-agent-evolution#1170",
     '<tool_call>{"name": "end_search", "arguments": ""}</tool_call>', (END,)),
    ("hermes", "vllm-project/vllm#19419", '<tool_call>{"name": "end_search"}</tool_call>', (END,)),
    ("tools", "vllm-project/vllm#32931", f"To find it:\n<tools>\n{BODY}\n{BODY}\n</tools>", (RIVER, RIVER)),
    ("bare", "ollama/ollama#12174", BODY, (RIVER,)),
    ("bare", "mark3labs/mcphost#12", f"\n\n  {BODY}   \n", (RIVER,)),
    ("bare", "vllm-project/vllm#46863",
     '{"type": "function", "name": "search_corpus", "parameters": {"query": "river"}}', (RIVER,)),
    ("bare", "diegosouzapw/OmniRoute#3154", "{'name': 'curate', 'arguments': {'add_ids': ['D1', 'D2']}}", (ADD,)),
    ("bare", "Oaklight/argo-proxy#59",
     "{'id': 'x', 'name': 'search_corpus', 'input': {'query': 'river'}, 'type': 'tool_use'}",
     (RIVER,)),
    ("bare", "ml-explore/mlx-lm#792", '{"tool": {"name": "search_corpus", "arguments": {"query": "river"}}}', (RIVER,)),
    ("bare", "ggml-org/llama.cpp#9639", f'{{"tool_calls": [{BODY}, {BODY}]}}', (RIVER, RIVER)),
    ("bare", "openai API: a call as clients get it",
     json.dumps({"type": "function", "function": {"name": "search_corpus", "arguments": ARGS}}),
     (RIVER,)),
    ("fenced", "vllm-project/vllm#32931", f"To find it, I call:\n\n```json\n{BODY}\n```", (RIVER,)),
    ("fenced", "ollama/ollama#5976", f"```\n{LLAMA}\n```\n", (RIVER,)),
    ("doubled", "Qwen/Qwen2.5-Coder-7B-Instruct: the chat template",
     f"<tool_call>\n{{{BODY}}}\n</tool_call>", (RIVER,)),
    ("doubled", "Qwen/Qwen2.5-Coder-7B-Instruct: the chat template",
     '{{"name": "search_corpus", "arguments": {{"query": "river"}}}}', (RIVER,)),
    ("doubled", "Qwen/Qwen2.5-Coder-7B-Instruct: the chat template", f"```json\n{{{BODY}\n```", (RIVER,)),
    ("element", "ollama/ollama#16686", f"I look for it.\n\n{QWEN}\n</tool_call>", (RIVER,)),
    ("element", "ollama/ollama#18563", QWEN.replace("</parameter>\n", ""), (RIVER,)),
    ("element", "vllm-project/vllm#22975",
     "<tool_call>\n<function=curate>\n<parameter=add_ids>\n[\"D1\"]\n</parameter>\n"
     '<parameter=importance>\n{"D1": "high"}\n</parameter>\n</function>\n</tool_call>', (TAGGED,)),
    ("element", "vllm-project/vllm#25028",
     "<function=curate><parameter=add_ids>['D1', 'D2']</parameter></function>", (ADD,)),
    ("element", "lablup/mlxcel#206", "<tool_call><function=end_search></function></tool_call>", (END,)),
    ("element", "meta-llama/Llama-3.1: custom functions", f"<function=search_corpus>{ARGS}</function>", (RIVER,)),
    ("element", "ikawrakow/ik_llama.cpp: function_calls.md", f"<tool_call>\n{INVOKE}\n</tool_call>", (RIVER,)),
    ("element", "MiniMaxAI/MiniMax-M2: the chat template",
     f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>", (RIVER,)),
    ("element", "lsdefine/GenericAgent#804", f"<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>", (RIVER,)),
    ("element", "lsdefine/GenericAgent#804", f"<‖DSML‖tool_calls>{DSML}</｜｜DSML｜｜tool_calls>", (RIVER,)),
    ("element", "ggml-org/llama.cpp#26849", '<atem:function_calls>\n<atem:invoke name="end_search"></atem:invoke>\n'
     "</atem:function_calls>", (END,)),
    ("llama", "meta-llama/Llama-3.1: built-in functions", f"<|python_tag|>{LLAMA}<|eom_id|>", (RIVER,)),
    ("llama", "vllm-project/vllm#16214", f"<|python_start|>{LLAMA}<|python_end|>", (RIVER,)),
    ("llama", "meta-llama/Llama-3.1: built-in functions", '<|python_tag|>search_corpus.call(query="river")', (RIVER,)),
    ("python", "vllm-project/vllm#22917",
     'To find it:\n[search_corpus(query="river"), curate(add_ids=["D1", "D2"])]', (RIVER, ADD)),
    ("python", "gpubuilders/OmniModel: LFM2_TOOL_SPEC.md",
     "<|tool_call_start|>[search_corpus(query='river')]<|tool_call_end|>", (RIVER,)),
    ("mistral", "raullenchai/Rapid-MLX#1071", f"[TOOL_CALLS]search_corpus{ARGS}</s>", (RIVER,)),
    ("mistral", "mistralai/Mistral-7B-Instruct-v0.3", f'[TOOL_CALLS] [{BODY[:-1]}, "id": "VvvODy9mT"}}]', (RIVER,)),
    ("mistral", "raullenchai/Rapid-MLX#581",
     f"[TOOL_CALLS]search_corpus[ARGS]{ARGS}[TOOL_CALLS]end_search{{}}", (RIVER, END)),
    ("mistral", "mistralai/Mistral-Small-3.2: tokens",
     f"[TOOL_CALLS]search_corpus[CALL_ID]3XhQnxLsT[ARGS]{ARGS}", (RIVER,)),
    ("mistral", "ai-dynamo/dynamo#10725", f"[TOOL_CALLS][{BODY}][/TOOL_CALLS]", (RIVER,)),
    ("deepseek", "vllm-project/vllm#23454",
     f"I look.{CALLS}{DEEP}\n{DEEP}{CALLS_END}<｜end▁of▁sentence｜>", (RIVER, RIVER)),
    ("deepseek", "raullenchai/Rapid-MLX#795",
     f"{CALLS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>search_corpus\n```json\n{ARGS}\n"
     f"```<｜tool▁call▁end｜>{CALLS_END}", (RIVER,)),
    ("deepseek", "sgl-project/sglang#9446", f"<think>It is a river.{CALLS}{DEEP}{CALLS_END}", (RIVER,)),
    ("kimi", "ikawrakow/ik_llama.cpp: function_calls.md", f"{SECTION}\n{SPACED}\n{SECTION_END}", (RIVER,)),
    ("kimi", "ggml-org/llama.cpp#17376",
     f"I look.<|tool_call_section_begin|>{KIMI}<|tool_call_section_end|>", (RIVER,)),
    ("kimi", "thinking-machines-lab/tinker-cookbook#248",
     f"{SECTION}{KIMI.replace('functions.', '')}{SECTION_END}", (RIVER,)),
    ("kimi", "vllm-project/vllm#32216", f"<think>I look for it. {SECTION}{KIMI}{SECTION_END}", (RIVER,)),
    ("kimi", "vllm-project/vllm#24478",
     f"{SECTION}{KIMI}{KIMI.replace(':0', ':1')}{SECTION_END}<|im_end|>", (RIVER, RIVER)),
    ("kimi", "moonshotai/Kimi-K2-Instruct",
     f"{SECTION}<|tool_call_begin|>functions.end_search:0<|tool_call_argument_begin|>"
     f"<|tool_call_end|>{SECTION_END}", (END,)),
    ("harmony", "lablup/mlxcel#654", f"{ANALYSIS}{TO}{ARGS}<|call|>", (RIVER,)),
    ("harmony", "waybarrios/vllm-mlx#50", f"{TO.replace(' <', chr(10) + '<')}\n{ARGS}\n<|call|>", (RIVER,)),
    ("harmony", "ggml-org/llama.cpp#15181",
     f"<|start|>assistant to=functions.search_corpus<|channel|>commentary json<|message|>{ARGS}",
     (RIVER,)),
    ("harmony", "Augustas11/macprovider#743",
     "analysisLook for it.assistantcommentary to=functions.search_corpus json" + ARGS,
     (RIVER,)),
    ("harmony", "lablup/mlxcel#658",
     f"{ANALYSIS}{TO}{ARGS}<|call|><|start|>assistant{TO}{ARGS}<|call|>", (RIVER, RIVER)),
    ("harmony", "vllm-project/vllm#42454", f"{ANALYSIS}<|channel|>comment to=search_corpus<|message|>{ARGS}", (RIVER,)),
    ("harmony", "waybarrios/vllm-mlx#562", f"{ANALYSIS}{TO.replace('commentary', 'analysis')}{ARGS}<|call|>", (RIVER,)),
    ("keyed", "sgl-project/sglang#19925", f"<tool_call>search_corpus{PAIR}</tool_call>", (RIVER,)),
    ("keyed", "osaurus-ai/vmlx-swift#228", "<tool_call>end_search</tool_call>", (END,)),
    ("keyed", "lablup/mlxcel#765",
     "<tool_call>curate\n<arg_key>add_ids</arg_key>\n<arg_value>[\"D1\"]</arg_value>\n<arg_key>"
     'importance</arg_key>\n<arg_value>{"D1": "high"}</arg_value>\n</tool_call>', (TAGGED,)),
    ("keyed", "ml-explore/mlx-lm#792", f"<tool_call>search_corpus\n{ARGS}\n</tool_call>", (RIVER,)),
    ("others", "ibm-granite/granite-3.0: the chat template", f"<|tool_call|>[{BODY}]", (RIVER,)),
    ("others", "microsoft/Phi-4-mini-instruct", f"functools[{BODY}]", (RIVER,)),
    ("others", "nvidia/Nemotron-Nano-9B-v2: the chat template", f"<TOOLCALL>[{BODY}]</TOOLCALL>", (RIVER,)),
    ("others", "ggml-org/llama.cpp#16932", f"<tool_calls>[{BODY}]</tool_calls>", (RIVER,)),
    ("others", "CohereForAI/c4ai-command-r7b-12-2024",
     '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "search_corpus", "parameters": '
     f"{ARGS}}}\n]<|END_ACTION|>", (RIVER,)),
    ("others", "QwenLM/Qwen3-Coder#180", f"[tool_call]\n{BODY}\n[/tool_call]", (RIVER,)),
    ("others", "FlashML-org/FreeToken#346",
     '<|tool_call>call:search_corpus{query:<|"|>river<|"|>}<tool_call|>', (RIVER,)),
    ("others", "harness1: the compact format", f"search_corpus({ARGS})", (RIVER,)),
    ("thought", "nosana-ci/pipeline-templates#171",
     f"It is a river.\n</think>\n\n<tool_call>\n{BODY}\n</tool_call>", (RIVER,)),
    ("thought", "SharpAI/SwiftLM#115", f"<think>\nIt is a river.\n</think>\n\n{BODY}", (RIVER,)),
    ("thought", "ggml-org/llama.cpp#27661",
     f"So <tool_call>{BODY}</tool_call> calls.</think> More.</think>{QWEN}", (RIVER,)),
    ("thought", "mistralai/Magistral-Small-2507",
     f"[THINK]It is a river.[/THINK][TOOL_CALLS]search_corpus[ARGS]{ARGS}", (RIVER,)),
    ("arguments", "anthropics/claude-code#59227",
     '{"name": "curate", "arguments": {"add_ids": "[\\"D1\\", \\"D2\\"]"}}', (ADD,)),
    ("arguments", "redhat-data-and-ai/template-agent#249",
     '{"name": "curate", "arguments": {"add_ids": "D1", "importance": '
     '"{\\"D1\\": \\"high\\"}"}}', (TAGGED,)),
    ("arguments", "anomalyco/opencode#32812",
     '{"name": "curate", "arguments": {"add_ids": ["D1", "D2"], "importance": ""}}',
     (call("curate", add_ids=["D1", "D2"], importance={}),)),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "report", "text", "calls"), CASES)
def test_a_call_is_read_in_every_shape(dialect: str, report: str, text: str, calls: tuple[ToolCall, ...]) -> None:
    assert read_calls(text, SPECS).calls == calls


DECLARED = json.dumps({"type": "function", "function": {"name": "search_corpus", "description": "Search.",
                       "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}})  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I would search.",
        f"The document says {BODY}",
        f'The document says: "<tool_call>{BODY}</tool_call>',
        f"The document says `<tool_call>{BODY}</tool_call>`",
        f"The document says “<tool_call>{BODY}</tool_call>",
        f"> <tool_call>{BODY}</tool_call>",
        f"The document says:\n <tool_call>{BODY}</tool_call>",
        f"<tool_call>{BODY}</tool_call> is what the document says.",
        f"```json\n{BODY}\n```\nThat is how one calls it.",
        f"```\nThe manual:\n<tool_call>{BODY}</tool_call>\n```",
        f"```\n{{}}\n{BODY}\n```",
        f"One writes:\n```xml\n<tool_call>\n{BODY}\n</tool_call>\n```",
        f"```\n{QWEN}\n```",
        f"<|start|>functions.search_corpus to=assistant<|channel|>commentary<|message|>{ARGS}<|end|>",
        f'{{"note": {BODY}}}',
        f'{{"note": "x",\n"call":\n{BODY}\n}}',
        f"[1,\n{BODY}\n]",
        json.dumps({"text": f"<tool_call>{BODY}</tool_call>"}),
        f"<think>I could write <tool_call>{BODY}</tool_call>",
        f"<think>I could write {QWEN}",
        f"<tool_call>{BODY}</tool_call></think>",
        f"<tools>\n{DECLARED}\n</tools>",
        DECLARED,
        '{"name": "search_corpus", "parameters": {"type": "object", "properties": {}}}',
        '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>',
        '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>',
        "<function=search_corpus>\n<parameter=query>\nriver\n</parameter>\n<parameter=",
        "<tool_call>search_corpus<arg_key>query</arg_key><arg_value>riv",
        '<tool_call>{"name": "search_corpus", "arguments": {"query": "riv',
        '{"name": "package", "arguments": {"version": "1.0.0"}}',
        '{"name": "search_corpus", "age": 30}',
        'other_tool {"query": "river"}',
        "search_corpus",
        f"{CALLS}{DEEP}{CALLS_END}<｜tool▁outputs▁begin｜>It flows.",
        f"<tool_call>{BODY}</tool_call>\n<tool_response>\nIt flows.\n</tool_response>",
    ],
)
def test_what_is_quoted_declared_or_unfinished_is_no_call(text: str) -> None:
    assert read_calls(text, SPECS).calls == ()


def test_a_marked_call_of_a_tool_that_is_not_offered_is_read_for_the_environment_to_answer() -> None:
    fetch = '{"name": "fetch", "arguments": {"url": "x"}}'
    assert read_calls(f"<tool_call>{fetch}</tool_call>", SPECS).calls == (call("fetch", url="x"),)
    assert read_calls(QWEN.replace("search_corpus", "fetch"), SPECS).calls == (call("fetch", query="river"),)
    assert read_calls(fetch, SPECS).calls == ()


def test_what_a_message_says_beside_its_calls_is_kept() -> None:
    text = f"<think>It is a river.</think>I look.\n<tool_call>{BODY}</tool_call>"
    assert read_calls(text, SPECS) == Reading("It is a river.", "I look.", (RIVER,))
    assert read_calls("So.</think>It flows.", SPECS) == Reading("So.", "It flows.", ())
    assert read_calls(f"{ANALYSIS}{TO}{ARGS}<|call|>", SPECS).words == "Look for it."
    assert read_calls("<think>So", SPECS) == Reading("So", "", ())


def test_a_value_may_hold_tags_of_calls() -> None:
    for value in (f"<tool_call>{BODY}</tool_call>", "a</function>b"):
        for text in (QWEN, f"<tool_call>search_corpus{PAIR}</tool_call>"):
            assert read_calls(text.replace("river", value), SPECS).calls == (search(value),)


def test_of_a_message_that_was_cut_the_whole_calls_are_read() -> None:
    whole = f"<tool_call>{BODY}</tool_call>\n"
    assert read_calls(f"{whole}<tool_call>{BODY[:-9]}", SPECS, cut=True).calls == (RIVER,)
    assert read_calls(f"{whole}<tool_call>{BODY[:-9]}", SPECS).calls == ()
    assert read_calls(whole * 3, SPECS, cut=True).calls == (RIVER,) * 3
    for unfinished in (
        BODY[:-1],
        f"{QWEN[:-20]}",
        "<function=search_corpus>\n<parameter=query>\nriver\n</parameter>\n",
    ):
        assert read_calls(f"{whole}{unfinished}", SPECS, cut=True).calls == (RIVER,)
        assert read_calls(unfinished, SPECS, cut=True).calls == ()
    for other in ('{"x": 1}', "<b>so</b>", "So."):
        assert read_calls(f"{whole}{other}", SPECS, cut=True).calls == ()


def spec(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


LIST = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("given", "schema", "fitted"),
    [
        ('["a"]', LIST, ["a"]),
        ("['a', 'b']", LIST, ["a", "b"]),
        ("a", LIST, ["a"]),
        ("", LIST, []),
        ("[a", LIST, ["[a"]),
        ('"a"', LIST, ['"a"']),
        ("x", {"type": "array", "items": {"type": "object"}}, "x"),
        ('["a"]', {"type": "string"}, '["a"]'),
        ('["a"]', {"anyOf": [{"type": "string"}, LIST]}, '["a"]'),
        ('["a"]', {"anyOf": [{"type": "null"}, LIST]}, ["a"]),
        ("null", {"anyOf": [{"type": "null"}, {"type": "integer"}]}, None),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("", {"type": "object"}, {}),
        ("nonsense", {"type": "object"}, "nonsense"),
        ("5", {"type": "integer"}, 5),
        ("true", {"type": "integer"}, "true"),
        ("True", {"type": "boolean"}, True),
        ("0.5", {"type": "number"}, 0.5),
        ('"very_high"', {"enum": ["very_high"]}, '"very_high"'),
        ('{"x": 1}', {"$ref": "#/$defs/Point"}, {"x": 1}),
        (["a"], {"type": "string"}, ["a"]),
        ("x", True, "x"),
    ],
)
def test_texts_become_what_the_schema_wants(given: Any, schema: Any, fitted: Any) -> None:
    root = spec(value=schema) | {"$defs": {"Point": {"type": "object"}}}
    assert fit_arguments({"value": given, "other": "[1]"}, root) == {"value": fitted, "other": "[1]"}
    assert fit_arguments({"value": given}, {}) == {"value": given}


def test_arguments_are_an_object_whatever_encodes_them() -> None:
    for given in ({"a": 1}, '{"a": 1}', json.dumps('{"a": 1}'), '```json\n{"a": 1,}\n```'):
        assert decode_arguments(given) == {"a": 1}
    assert [decode_arguments(given) for given in (None, "", " \n", {}, "{}")] == [{}] * 5
    assert [decode_arguments(given) for given in ("x", "[1]", [1], 3, True)] == [None] * 5


HUGE = (
    *(each * 20_000 for each in ("{", "[", '{"a":', "<tool_call>", "<|a|>", "```\n", "{\n", "[\n")),
    *(each * 20_000 for each in ("(", "\n", " ", '"', "a")),
    "{'" + "\\'" * 40_000 + "}",
    *(
        each * 4_000
        for each in ("<tool_call>x<arg_key>k</arg_key><arg_value>", "<function=a><parameter=b>", "</think>")
    ),
    *(
        each * 4_000
        for each in ("<|a|> to=b", "to=functions.a", 'search_corpus("', "search_corpus {\n", "<think>", "> ")
    ),
    *(
        each * 2_000
        for each in (f"{BODY}\n", f"<tool_call>{BODY}</tool_call>", QWEN, KIMI, f'"{BODY}', f"{BODY} and\n")
    ),
)


@pytest.mark.parametrize("huge", HUGE, ids=range(len(HUGE)))
def test_huge_messages_are_read_in_bounded_time(huge: str) -> None:
    begun = time.process_time()
    for text in (
        huge,
        f"<tool_call>{huge}",
        f'{{"name": "search_corpus", "arguments": {{"query": "{huge}',
        f"{huge}\n{BODY}",
    ):
        assert len(read_calls(text, SPECS).calls) <= MOST_CALLS
    assert time.process_time() - begun < 2


def test_messages_drawn_at_random_neither_raise_nor_become_other_calls() -> None:
    assert min(draw(2_000, seed=1).values()) > 200


def test_a_long_word_in_place_of_an_array_costs_no_time_in_its_square() -> None:
    began = time.process_time()
    schema = {"properties": {"ids": {"type": "array", "items": {"type": "string"}}}}
    assert fit_arguments({"ids": "x" * 60_000}, schema) == {"ids": ["x" * 60_000]}
    assert time.process_time() - began < 5.0  # it was six minutes
