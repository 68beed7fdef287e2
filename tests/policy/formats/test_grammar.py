"""Grammars: whatever is sampled under one is exactly one call that its tool accepts, and outputs of teachers fit it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.config import Curation, Env
from harness1.errors import UsageError
from harness1.policy.backend import Grammar
from harness1.policy.formats.grammar import STRING, THOUGHT, arguments_rules, make_grammar
from harness1.records import ToolCall
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec
from tests.support import call, search
from tests.vocabularies import chat_format

TOOLBOX = Toolbox.of(Env())
STOP = 256
BYTES = xgrammar.TokenizerInfo(
    [bytes([value]) for value in range(256)] + [b"</s>"], vocab_size=257, stop_token_ids=[STOP]
)
FORMATS = (("hermes", "qwen"), ("hermes", "chatml"), ("compact", "chatml"))
WALKS = 60
CLOSERS = b'"]}\n'
short = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


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


def outputs(name: str, kind: str, env: Env, walks: int = WALKS) -> Iterator[tuple[str, tuple[ToolCall, ...], Any]]:
    """Texts drawn from the grammar of a toolbox, and what the format reads in each."""
    chat = chat_format(name, kind)
    specs = Toolbox.of(env).specs
    state = matcher(chat.grammar(specs))
    dice = random.Random(f"{name}/{kind}")
    for _ in range(walks):
        text = walk(state, dice)
        ids = (*chat.write(text), *chat.stop_ids) if kind == "qwen" else (*chat.text(text), *chat.stop_ids)
        found = chat.parse(ids, specs)
        yield text, found.actions, found.error


@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_what_is_sampled_is_one_call_that_its_tool_accepts(name: str, kind: str) -> None:
    seen = set()
    for text, actions, error in outputs(name, kind, Env()):
        assert (len(actions), error) == (1, None), text
        tool = TOOLBOX.tools[actions[0].name]
        msgspec.convert(actions[0].arguments, tool.arguments)
        seen.add(actions[0].name)
    assert len(seen) > 3


def test_a_grammar_knows_the_shown_tools_and_arguments_alone() -> None:
    chat = chat_format("compact", "chatml")
    full, bare = (chat.grammar(Toolbox.of(env).specs) for env in (Env(), Env(curation=Curation(tags=False))))
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
        text = chat.tokenizer.decode(chat.speak(reasoning, action)[:-1])
        assert accepts(grammar, text), text


def test_every_type_of_a_schema_has_a_rule() -> None:
    fields = {name: {"type": name} for name in ("integer", "number", "boolean", "string", "array", "object")}
    spec = ToolSpec("t", "", {"properties": fields, "required": ["integer"]})
    grammar = make_grammar("args_t", arguments_rules([spec]))
    state, dice = matcher(grammar), random.Random(1)
    for _ in range(10):
        found = msgspec.json.decode(walk(state, dice))
        assert isinstance(found["integer"], int)
        assert isinstance(found.get("number", 0), int | float)
        assert isinstance(found.get("boolean", True), bool)
    assert accepts(grammar, '{"integer": -12, "number": 0.50, "boolean": true, "string": "\\u0001\\n\\"", "array": []}')
    assert not accepts(grammar, '{"integer": 007}')


def test_harmony_offers_none() -> None:
    with pytest.raises(UsageError, match="not offered with the harmony format"):
        chat_format("harmony", "harmony").grammar(TOOLBOX.specs)
