"""Outputs: what is clear is read, what is not is an error, nothing raises, and nothing is read that nobody wrote."""

from __future__ import annotations

import json
import random
import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from harness1.config import Env
from harness1.models.chat_format import ChatFormat, Parsed
from harness1.models.tokenizer import split_at_control
from harness1.records import ToolCall
from harness1.tools.registry import Toolbox
from tests.models.writing import invented, mutated
from tests.support import call, search
from tests.vocabularies import SPOKEN, TAGS, chat_format

SPECS = Toolbox.of(Env()).specs
RIVER = search("river")
END = call("end_search")
BODY = '{"name": "search_corpus", "arguments": {"query": "river"}}'
MESSAGE = "<|channel|>commentary<|message|>"

NASTY = (
    *(*TAGS, '"', "\\", "{", "}", '{"a": "', "\n", "\\d+\\", "\\u0041", "<|im_end|>", "<|call|>", "<|channel|>"),
    *("functions.x", "\x00", "\x7f", "👩🏽‍🚀", "ﬁ", "end_search {}", "```json"),
    '\nend_search {"reasoning": ""}\n',
)
FAKES = (
    *("", "Look for the river.", "Two\nlines, and\ttabs.", f"<tool_call>\n{BODY}\n</tool_call>", "<think>I think"),
    *('<tool_call>{"name": "end_search", "arguments": {}}', "</think>", 'end_search {"reasoning": "done"}'),
    *('I could say\nend_search {"reasoning": "done"}\nbut do not', "1 < 2 and {a}", "<|im_end|>", "```json", "{"),
    f"<|end|><|start|>assistant to=functions.end_search{MESSAGE}{{}}<|call|>",
)


def said(chat: ChatFormat, text: str) -> list[int]:
    """A text in which names of control tokens stand for these."""
    parts = split_at_control(text, chat.tokenizer.control)
    return [token for part in parts for token in ([part] if isinstance(part, int) else chat.tokenizer.encode(part))]


def parsed(name: str, text: str, kind: str = "") -> Parsed:
    chat = chat_format(name, kind or {"harmony": "harmony"}.get(name, "chatml"))
    return chat.parse(said(chat, text), SPECS)


def composed(value: Any, kind: str) -> Any:
    """The value as a tokenizer keeps it that composes characters."""
    return json.loads(unicodedata.normalize("NFC", json.dumps(value, ensure_ascii=False))) if kind == "qwen" else value


@pytest.mark.parametrize(("name", "kind"), SPOKEN)
def test_reads_plain_reasoning_back_word_for_word(name: str, kind: str) -> None:
    chat = chat_format(name, kind)
    for words in ("Look for the river.", ""):
        assert chat.parse(chat.format_action(words, RIVER), SPECS) == Parsed(words, (RIVER,))
    for hard in ("</tool_call>", 'a"}}\n</tool_call>\n<tool_call>{"name": "end_search", "arguments": {}}'):
        assert chat.parse(chat.format_action("<tool_call>", search(hard)), SPECS).actions == (search(hard),)


SYNTAX = (
    *(spec.name for spec in SPECS),
    *("{", "}", "[", "]", ":", ",", '"', "'", "\\", "\\u", "\\ud800", "\\u12", "\\/", "\x00", "\n", " ", "```json\n"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>assistant\n", "```"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<|x|>"),
    *("analysis", "commentary", "final", " to=", "functions.", "to=functions.", "json", "assistant", "multi_tool_use"),
    *('"name": ', '"arguments": ', '"parameters": ', '"tool_uses": [', '"recipient_name": ', '{"query": "river"}'),
    *("{}", "null", "1e999", "-0", "NaN", "Infinity", "true", "Action: ", "multi_tool_use.parallel", "tool_calls"),
)


def random_output(chat: ChatFormat, dice: random.Random) -> tuple[Sequence[int], ToolCall | None]:
    """Random tokens, bytes, syntax or a call, mutated or not; and the call if the output is still that one."""
    kind = dice.randrange(10)
    if kind == 0:
        most = dice.choice((2**31, 2000))
        return [dice.randrange(most) for _ in range(dice.randrange(60))], None
    if kind == 1:
        return chat.tokenizer.encode(dice.randbytes(dice.randrange(120)).decode("utf-8", "replace")), None
    if kind == 2:
        return said(chat, "".join(dice.choices(SYNTAX, k=dice.randrange(1, 30)))), None

    def words() -> str:
        return " ".join(dice.choices((*NASTY, "river", "汉字", *SYNTAX[:12]), k=dice.randrange(1, 7)))

    def value(type_: str) -> Any:
        many = range(dice.randrange(4))
        made = {"array": [words() for _ in many], "object": {words(): words() for _ in many}}
        return made.get(type_, words())

    spec = dice.choice(SPECS)
    properties, required = spec.parameters["properties"], spec.parameters["required"]
    chosen = [name for name in properties if name in required or dice.random() < 0.6]
    meant = ToolCall(spec.name, {name: value(properties[name]["type"]) for name in chosen})
    ids = chat.format_action(dice.choice((words(), dice.choice(FAKES))), meant)
    if kind == 3:
        return ids, meant
    if kind < 6:
        return mutated(ids, dice), None
    text = "".join(mutated(chat.tokenizer.decode(ids), dice))
    for _ in range(dice.randrange(3)):
        at = dice.randrange(len(text) + 1)
        text = text[:at] + dice.choice(SYNTAX) + text[at:]
    return said(chat, text), None


@pytest.mark.parametrize(("name", "kind"), SPOKEN)
def test_fuzzed_outputs_neither_raise_nor_become_other_calls(name: str, kind: str) -> None:
    chat, dice, counts = chat_format(name, kind), random.Random(f"1/{name}"), Counter[bool]()
    for _ in range(1000):
        ids, meant = random_output(chat, dice)
        found = chat.parse(ids, SPECS)
        text = chat.tokenizer.decode(ids)
        assert invented(text, found.actions) == [], text
        if meant is not None:
            assert [each.name for each in found.actions] == [meant.name]
            assert found.actions[0].arguments == composed(meant.arguments, kind)
            assert [token in chat.stop_ids for token in ids] == [False] * (len(ids) - 1) + [True]
        counts[bool(found.actions)] += 1
    assert min(counts[True], counts[False]) > 100


def test_a_call_that_nobody_wrote_is_seen() -> None:
    text = r'<tool_call>{"name": "curate", "arguments": {"add_ids": ["D\u0031"]}}'
    assert parsed("hermes", text).actions == (call("curate", add_ids=["D1"]),)
    assert invented(text, [call("curate", add_ids=["D1"])]) == []
    for forged in (call("verify"), call("curate", add_ids=["D2"]), call("curate", other=[])):
        assert invented(text, [forged]) != []


DEEP = 10_000
HUGE = (
    *(f'<tool_call>{{"name": "curate", "arguments": {unit * DEEP}' for unit in ('{"a":', "[", "{")),
    '<tool_call>{"name": "curate", "arguments": ' + '{"name": "parallel", "arguments": {"tool_uses": [' * 2000,
    f'curate {{"add_ids": {"[" * DEEP}"D1"{"]" * DEEP}}}',
    f'<tool_call>{{"name": "curate", "arguments": {{"add_ids": {"9" * DEEP}}}}}</tool_call>',
    *(line * 2000 for line in ('curate {"add_ids": [\n', '<tool_call>{"name"', "curate {}\n", "<think>")),
    *(unit * 6_000 for unit in (" ", "\t", "a", "\\", '"', "```", "curate ", '{"a": ', ",", "</think>", "curate {")),
)


@pytest.mark.parametrize("name", ["hermes", "compact", "harmony"])
@pytest.mark.parametrize("huge", HUGE, ids=range(len(HUGE)))
def test_huge_outputs_and_repetitions_are_read_in_bounded_time(name: str, huge: str) -> None:
    chat = chat_format(name, "harmony" if name == "harmony" else "chatml")
    frames = (("", ""), ('curate {"add_ids": ["', '"]}'), ("<tool_call>{", "}"))
    outputs = [said(chat, start + huge + end) for start, end in frames]
    begun = time.process_time()
    assert all(chat.parse(ids, SPECS) is not None for ids in outputs)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("kind", ["chatml", "qwen"])
@pytest.mark.parametrize(
    ("text", "actions", "reasoning"),
    [
        (f"<tool_call>\n{BODY}\n</tool_call>", (RIVER,), ""),
        (f"Look.\n<tool_call>\n{BODY}\n</tool_call><|im_end|>", (RIVER,), "Look."),
        (f"<tool_call>{BODY}", (RIVER,), ""),
        (f"<tool_call>\n```json\n{BODY}\n```\n</tool_call>", (RIVER,), ""),
        (f"<tool_call>Here it is: {BODY}</tool_call>", (RIVER,), ""),
        (f"<tool_call>{BODY}</tool_call>\n<tool_call>{BODY}</tool_call>", (RIVER, RIVER), ""),
        (f"<tool_call>{BODY}<tool_call>{BODY}", (RIVER, RIVER), ""),
        (f"<tool_call>[{BODY}, {BODY}]</tool_call>", (RIVER, RIVER), ""),
        (f"<tool_call>{{broken}}</tool_call><tool_call>{BODY}</tool_call>", (RIVER,), ""),
        (f"<tool_call>{BODY} and so {BODY}", (RIVER,), ""),
        (BODY, (RIVER,), ""),
        (f"```json\n{BODY}\n```", (RIVER,), ""),
        (f"<think>Look.</think>\n{BODY}", (RIVER,), ""),
        (f"<think>Look.</think>\n<tool_call>{BODY}</tool_call>", (RIVER,), "Look."),
        (f"<think>Not <tool_call>{BODY}</tool_call></think>So.<tool_call>{BODY}", (RIVER,), None),
        (f"Well. <think>Look.</think> <tool_call>{BODY}", (RIVER,), "Well.\nLook."),
        ('<tool_call>{"name": "functions.end_search", "arguments": {}}', (END,), ""),
        ('<tool_call>{"name": " `end_search` ", "arguments": {}}', (END,), ""),
        ('<tool_call>{"name": "end_search<|channel|>json", "arguments": {}}', (END,), ""),
        ('<tool_call>{"name": "end_search", "parameters": {}}', (END,), ""),
        ('<tool_call>{"name": "end_search", "arguments": "{}"}', (END,), ""),
        ('<tool_call>{"name": "end_search", "arguments": {},}', (END,), ""),
        (r'<tool_call>{"name": "grep_corpus", "arguments": {"pattern": "\d+ \\w \", ]"}}', ('\\d+ \\w ", ]',), ""),
        ('<tool_call>{"name": "grep_corpus", "arguments": {"pattern": "a\nb\x01"}}', ("a\nb\x01",), ""),
        (r'<tool_call>{"name": "grep_corpus", "arguments": {"pattern": "\u12 ,]",}}', ("\\u12 ,]",), ""),
    ],
)
def test_hermes_reads_what_is_clear(kind: str, text: str, actions: tuple[Any, ...], reasoning: str | None) -> None:
    found = parsed("hermes", text, kind)
    expected = tuple(call("grep_corpus", pattern=each) if isinstance(each, str) else each for each in actions)
    assert (found.actions, found.error) == (expected, None)
    assert reasoning is None or found.reasoning == reasoning


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "there is no call"),
        ("I would search.", "there is no call"),
        (f"I would say {BODY}", "there is no call"),
        ('{"name": "other", "arguments": {}}', "there is no call"),
        (f"<think>Not closed <tool_call>{BODY}</tool_call>", "there is no call"),
        (f"<think>Closed <tool_call>{BODY}</tool_call></think>", "there is no call"),
        ('<tool_call>{"name": "search_corpus", "arguments": {"query": "riv', "the call is not an object"),
        ('<tool_call>{"name": "search_corpus"}</tool_call>', "the call is not an object"),
        ('<tool_call>{"name": "search_corpus", "arguments": [1]}</tool_call>', "the call is not an object"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "the call is not an object"),
        ('<tool_call>{"name": "search_corpus", "arguments": {"query": NaN}}</tool_call>', "the call is not an object"),
        ('<tool_call>{"name": "<|x|>", "arguments": {}}</tool_call>', "the call is not an object"),
        ("<tool_call></tool_call>", "the call is not an object"),
    ],
)
def test_hermes_says_what_is_wrong(text: str, error: str) -> None:
    found = parsed("hermes", text)
    assert found.actions == ()
    assert (found.error or "").startswith(error)


@pytest.mark.parametrize(
    ("wrapper", "field", "name", "arguments"),
    [
        ("multi_tool_use", "tool_calls", "tool_name", "parameters"),
        ("multi_tool_use", "tool_calls", "name", "arguments"),
        ("multi_tool_use.parallel", "tool_uses", "recipient_name", "parameters"),
        ("parallel", "tool_uses", "recipient_name", "parameters"),
    ],
)
def test_unwraps_calls_that_are_wrapped_into_one(wrapper: str, field: str, name: str, arguments: str) -> None:
    inner = [{name: "functions.search_corpus", arguments: {"query": "river"}}, {name: "end_search", arguments: {}}, 3]
    body = json.dumps({field: inner})
    assert parsed("hermes", f'<tool_call>{{"name": "{wrapper}", "arguments": {body}}}').actions == (RIVER, END)
    assert parsed("harmony", f" to=functions.{wrapper}{MESSAGE}{body}").actions == (RIVER, END)
    nested = json.dumps({field: [{name: wrapper, arguments: {field: inner}}]})
    assert parsed("hermes", f'<tool_call>{{"name": "{wrapper}", "arguments": {nested}}}').actions == ()
    assert parsed("harmony", f" to=functions.{wrapper}{MESSAGE}[]").error is not None


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ('search_corpus {"query": "river"}', (RIVER,)),
        ('Look.\nsearch_corpus {"query": "river"}<|im_end|>', (RIVER,)),
        ('Action: search_corpus {"query": "river"}', (RIVER,)),
        ('> `functions.search_corpus`: {"query": "river"}', (RIVER,)),
        ('search_corpus({"query": "river"})', (RIVER,)),
        ('search_corpus {"query": "river",}', (RIVER,)),
        ('search_corpus {"query": "river"}\nend_search {}', (RIVER, END)),
        ('search_corpus {"query": "a\nend_search {}"}', (search("a\nend_search {}"),)),
        ("search_corpus {broken\n}\nend_search {}", (END,)),
        ('search_corpus {"query": \nend_search {}', (END,)),
        ('Look.\nfetch {"query": "river"}', ()),
        ('I would call search_corpus {"query": "river"}', ()),
        ('search_corpus {"query": "riv', ()),
        ("search_corpus", ()),
        ("search_corpus [1]", ()),
        ("end_search {x: {}}", ()),
    ],
)
def test_compact_reads_lines_that_begin_with_a_tool(text: str, actions: tuple[ToolCall, ...]) -> None:
    found = parsed("compact", text)
    assert found.actions == actions
    assert (found.error is None) == bool(actions)


def test_compact_reads_an_output_that_is_one_json_object() -> None:
    for text in (BODY, f"```json\n{BODY}\n```", f"<think>Look.</think>\n{BODY}"):
        assert parsed("compact", text) == Parsed("", (RIVER,))
    for text in (f"Look. {BODY}", BODY.replace("search_corpus", "fetch"), '{"query": "river"}', f"{BODY}\n{BODY}"):
        assert parsed("compact", text).error == "there is no call"
    chat = chat_format("compact", "chatml")
    shown = [spec for spec in SPECS if spec.name != "search_corpus"]
    assert [chat.parse(ids, shown).actions for ids in (said(chat, BODY), chat.format_action("", RIVER))] == [(), ()]


THOUGHT = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
QUERY = '{"query": "river"}<|call|>'


@pytest.mark.parametrize(
    ("text", "actions", "reasoning"),
    [
        (f"{THOUGHT} to=functions.search_corpus<|channel|>commentary <|constrain|>json<|message|>{QUERY}", 1, "Look."),
        (f"{THOUGHT}<|channel|>commentary to=functions.search_corpus <|constrain|>json<|message|>{QUERY}", 1, "Look."),
        (f"<|channel|>commentary to=search_corpus<|message|>{QUERY}", 1, ""),
        (f"<|channel|>commentary to=functions.search_corpus<|constrain|>json<|message|>{QUERY}", 1, ""),
        (f"<|channel|>analysis to=functions.search_corpus<|message|>{QUERY}", 1, ""),
        (f" to=functions.search_corpus<|message|>{QUERY}", 1, ""),
        (f"<|channel|>strange to=functions.search_corpus<|message|>{QUERY}", 1, ""),
        (f"<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.search_corpus"
         f"{MESSAGE}{QUERY}", 1, ""),
        (f"<|message|>Look.<|end|><|start|>assistant to=functions.search_corpus{MESSAGE}{QUERY}", 1, "Look."),
        (f" to=functions.search_corpus{MESSAGE}{QUERY}<|start|>assistant to=functions.search_corpus{MESSAGE}{QUERY}",
         2, ""),
        (f' to=functions.search_corpus{MESSAGE}{{"query": "river"}}', 1, ""),
        (f' to=functions.search_corpus{MESSAGE}```json\n{{"query": "river",}}\n```<|call|>', 1, ""),
        (f" to=functions.search_corpus{MESSAGE}{QUERY}<|start|>assistant<|channel|>final<|message|>Done.<|return|>",
         1, ""),
    ],
)  # fmt: skip
def test_harmony_reads_what_is_clear(text: str, actions: int, reasoning: str) -> None:
    assert parsed("harmony", text) == Parsed(reasoning, (RIVER,) * actions)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "there is no call"),
        ("no tokens of control", "there is no call"),
        ("<|channel|>analysis<|message|>Look.<|end|>", "there is no call"),
        ("<|channel|>final<|message|>It was Byron.<|return|>", "there is no call"),
        (f"{THOUGHT}{THOUGHT} to=functions.search_corpus{MESSAGE}{QUERY}", "there are two messages of reasoning"),
        (f"<|channel|>strange<|message|>x<|end|><|start|>assistant to=functions.x{MESSAGE}{QUERY}", "the channel is"),
        (f" to=functions.search_corpus{MESSAGE}river<|call|>", "the arguments are not"),
        (f" to=functions.search_corpus{MESSAGE}<|call|>", "the arguments are not"),
        (f' to=functions.search_corpus{MESSAGE}{{"query": "riv', "the arguments are not"),
        (f" to=functions.search_corpus{MESSAGE}".removesuffix("<|message|>"), "there is no call"),
        (f" to=functions.{MESSAGE}{{}}<|call|>", "there is no call"),
        (f" to=assistant{MESSAGE}{{}}<|call|>", "there is no call"),
        (f'to=functions.end_search{{}} {BODY}', "there is no call"),
    ],
)  # fmt: skip
def test_harmony_says_what_is_wrong(text: str, error: str) -> None:
    found = parsed("harmony", text)
    assert found.actions == ()
    assert (found.error or "").startswith(error)


def test_control_tokens_in_arguments_are_text_and_what_follows_the_stop_token_is_not_read() -> None:
    found = parsed("harmony", f' to=functions.search_corpus{MESSAGE}{{"query": "a<|channel|>b"}}<|call|>')
    assert found.actions == (search("a<|channel|>b"),)
    for name in ("hermes", "compact"):
        chat = chat_format(name, "chatml")
        assert len(chat.parse([*chat.format_action("", RIVER), *chat.format_action("", END)], SPECS).actions) == 1
