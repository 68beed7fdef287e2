"""Grammars: whatever is sampled under one is exactly one call that its tool accepts, and outputs of teachers fit it."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.config import Env
from harness1.errors import UsageError
from harness1.models.backend import Grammar
from harness1.models.grammar import STRING, THOUGHT, arguments_rules, make_grammar
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec
from tests.support import call, search
from tests.vocabularies import chat_format

TOOLBOX = Toolbox.of(Env())
STOP = 256
BYTES = xgrammar.TokenizerInfo([bytes([at]) for at in range(256)] + [b"</s>"], vocab_size=257, stop_token_ids=[STOP])
FORMATS = (("hermes", "qwen"), ("hermes", "chatml"), ("compact", "chatml"))
CLOSERS = b'"]}\n'
short = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda it: all(it.split(" ")))
"""Words with one space between them: no teacher writes a handle or query of blanks, and no grammar here has one."""


def matcher(grammar: Grammar) -> xgrammar.GrammarMatcher:
    return xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(BYTES, max_threads=1).compile_grammar(grammar.ebnf))


def accepts(grammar: Grammar, text: str) -> bool:
    state = matcher(grammar)
    return state.accept_string(text) and state.accept_token(STOP)


def walk(state: Any, dice: random.Random) -> str:
    """A text drawn from a grammar, byte by byte; what closes something is drawn more often, or texts would be long."""
    state.reset()
    bits = torch.empty(1, 9, dtype=torch.int32)
    text = bytearray()
    while True:
        bits.fill_(-1)
        state.fill_next_token_bitmask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:257])
        closing = [each for each in allowed if each == STOP or each in CLOSERS]
        token = int(dice.choice(closing if closing and dice.random() < 0.15 else allowed))
        assert state.accept_token(token)
        if token == STOP:
            return text.decode("utf-8", "replace")  # a negated class admits surrogates
        text.append(token)


MODES = {"type": "string", "enum": ["a b", "é", "\U0001f600", '"']}
INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
OPTIONAL = {"anyOf": [INTEGERS, {"type": "null"}], "default": None}
NESTED = {"type": "object", "properties": {"a": MODES, "b": {"type": "integer"}}, "required": ["b", "c"]}
EDIT = {"mode": MODES, "<tool_call>": OPTIONAL, "lines": {"type": "array", "items": NESTED}}
OTHERS = (ToolSpec("get-weather", "", {}), ToolSpec("fs.edit", "", {"properties": EDIT}))


@pytest.mark.parametrize(("name", "kind"), FORMATS)
@pytest.mark.parametrize("specs", [TOOLBOX.specs, OTHERS], ids=["own tools", "tools of others"])
def test_what_is_sampled_is_one_call_that_its_tool_accepts(name: str, kind: str, specs: tuple[ToolSpec, ...]) -> None:
    chat, dice, seen = chat_format(name, kind), random.Random(f"{name}/{kind}"), set()
    state = matcher(chat.grammar(specs))
    for _ in range(40):
        text = walk(state, dice)
        found = chat.parse((*(chat.write if kind == "qwen" else chat.text)(text), *chat.stop_ids), specs)
        assert (len(found.actions), found.error) == (1, None), text
        if specs is TOOLBOX.specs:
            msgspec.convert(found.actions[0].arguments, TOOLBOX.tools[found.actions[0].name].arguments)
        seen.add(found.actions[0].name)
    assert len(seen) > 3 or seen == {"get-weather", "fs.edit"}


def test_a_grammar_knows_the_shown_tools_and_arguments_alone() -> None:
    chat = chat_format("compact", "chatml")
    full, bare = (chat.grammar(Toolbox.of(env).specs) for env in (Env(), Env().switch(tags=False)))
    assert full.digest != bare.digest
    tagged = 'curate {"add_ids": ["D1"], "importance": {"D1": "high"}}'
    assert accepts(full, tagged)
    assert not accepts(bare, tagged)
    assert accepts(bare, 'curate {"add_ids": ["D1"]}')
    assert accepts(full, "end_search {}")
    for text in (
        'fetch {"query": "x"}',
        "search_corpus {}",
        'search_corpus {"query": 3}',
        'search_corpus {"query": "x"} ',
        'search_corpus {"query": ""}',
        'search_corpus {"query": "x", "k": "5"}',
        f'search_corpus {{"query": "{" ".join("x" * (STRING + 1))}"}}',
        f'{" ".join("x" * (THOUGHT + 1))}\nsearch_corpus {{"query": "x"}}',
        "",
    ):
        assert not accepts(full, text), text


@pytest.mark.parametrize("name", ["hermes", "compact"])
@settings(max_examples=12)
@given(reasoning=short | st.just(""), query=short, handle=short)
def test_what_a_teacher_says_in_short_fits_the_grammar(name: str, reasoning: str, query: str, handle: str) -> None:
    chat = chat_format(name, "chatml")
    grammar = chat.grammar(TOOLBOX.specs)
    for action in (search(query), call("curate", add_ids=[handle, query], importance={handle: "high"})):
        text = chat.tokenizer.decode(chat.format_action(reasoning, action)[:-1])
        assert accepts(grammar, text), text


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return make_grammar("args_t", arguments_rules([ToolSpec("t", "", {"properties": {"x": schema}})]))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (INTEGERS, ([1], [1, -2, 3]), ([], ["1"], [1, 2, 3, 4], 1)),
        (MODES, ("a b", "é", "\U0001f600", '"'), ("", "b", None)),
        ({"enum": [1, None, "x"]}, (1, None, "x"), (2, "1")),
        ({"type": "object", "const": {"a": [1]}}, ({"a": [1]},), ({},)),
        ({"type": "array", "items": MODES}, ([], ["é", '"']), (["b"], "é")),
        ({"type": ["integer", "null"], "description": "d"}, (3, None), ("3", "null")),
        (OPTIONAL, ([4], None), ([None], "x")),
        ({"type": "array", "items": OPTIONAL}, ([], [None, [1]]), ([[]],)),
        (NESTED, ({"b": 1, "c": "x"}, {"a": "é", "b": 1, "c": "x"}), ({}, {"b": "1", "c": "x"}, {"b": 1})),
        ({"type": "array", "items": NESTED}, ([{"b": 1, "c": "x"}],), ([{}], [1])),
        ({"type": "object", "properties": {}}, ({},), ({"a": "x"},)),
        ({"type": "object", "additionalProperties": False}, ({},), ({"a": "x"},)),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, ({}, {"a": True}), ({"a": "x"},)),
        ({"type": "object", "maxProperties": 1}, ({"a": "x"},), ({"a": "x", "b": "x"}, {"a": 1})),
        ({}, ("x", "\u0001\n"), (1,)),
        ({"type": "integer"}, (-12, 0), (0.5, "1")),
        ({"type": "number"}, (-12, 0.5), ("1",)),
        ({"type": "boolean"}, (True, False), (None, 1)),
    ],
)
def test_an_argument_is_what_its_schema_says(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    grammar = grammar_of(schema)
    for values, fits in ((right, True), (wrong, False)):
        for value in values:
            assert accepts(grammar, json.dumps({"x": value}, ensure_ascii=False)) == fits, value
    assert accepts(grammar, "{}")
    assert not accepts(grammar, '{"x": 007}')


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/x"},
        {"type": "string", "pattern": "^a"},
        {"type": "integer", "minimum": 1},
        {"type": "array", "minItems": 9},
        {"type": "tuple"},
        {"enum": []},
        {"type": "string", "anyOf": [{}]},
        {"type": "array", "items": [{}]},
        json.loads('{"type": "array", "items": ' * 100 + "{}" + "}" * 100),
    ],
)
def test_a_schema_that_no_rule_can_hold_is_refused_with_the_name_of_its_tool(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no grammar for the tool t:"):
        grammar_of(schema)


def test_a_grammar_grows_as_its_optional_arguments_do() -> None:
    few, many = (
        arguments_rules([ToolSpec("t", "", {"properties": {f"p{at:03}": {} for at in range(size)}})])
        for size in (20, 200)
    )
    assert len(many) < 12 * len(few)
    grammar = make_grammar("args_t", many)
    for names in ((), ("p000",), ("p003", "p100"), ("p000", "p198", "p199")):
        assert accepts(grammar, json.dumps(dict.fromkeys(names, "x")))
    assert not accepts(grammar, '{"p100": "x", "p003": "x"}')


def test_harmony_offers_none() -> None:
    with pytest.raises(UsageError, match="not offered with the harmony format"):
        chat_format("harmony", "harmony").grammar(TOOLBOX.specs)
