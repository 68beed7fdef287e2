"""Tokenizers: texts never become control tokens, ids of any kind have a text, and what would not join is refused."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from harness1.errors import ConfigError, UsageError
from harness1.models.formats import Compact, Harmony, Hermes, open_format
from harness1.models.tokenizer import FastTokenizer, open_tokenizer, split_at_control
from tests.vocabularies import CHATML, KINDS, TAGS, tokenizer, vocabulary


def changed(kind: str, **fields: Any) -> bytes:
    return json.dumps({**json.loads(vocabulary(kind)), **fields}).encode()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_is_encoded_as_the_library_does_and_comes_back(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text)
    assert tokenizer(kind).decode(ids) == (unicodedata.normalize("NFC", text) if kind == "qwen" else text)
    if not any(name in text for name in tokenizer(kind).control):
        assert ids == Tokenizer.from_buffer(vocabulary(kind)).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_control_tokens_in_a_text_are_text(kind: str) -> None:
    made = tokenizer(kind)
    control = set(made.control.values())
    assert len(control) == len(KINDS[kind][1]) + len(KINDS[kind][2])
    for name in made.control:
        text = f"a {name} b{name}"
        assert control.isdisjoint(made.encode(text))
        assert made.decode(made.encode(text)) == text
        assert made.decode([made.control[name]]) == name


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(ids=st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 1600)))
def test_any_ids_have_a_text(kind: str, ids: list[int]) -> None:
    assert isinstance(tokenizer(kind).decode(ids), str)


def test_a_control_token_that_is_also_a_word_of_the_vocabulary_is_never_made_of_a_text() -> None:
    tree = json.loads(vocabulary("chatml"))
    # A model may look whole words up before it merges; then the name of a token in a text would become the token.
    end = tree["added_tokens"][-1]["id"]
    tree["model"]["vocab"]["<|im_end|>"] = end
    tree["model"]["ignore_merges"] = True
    tree["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    made = FastTokenizer(json.dumps(tree).encode())
    assert made._plain.encode("<|im_end|>").ids == [end]
    assert made.encode("<|im_end|>") != [end]
    assert made.decode(made.encode("<|im_end|>")) == "<|im_end|>"


def test_control_tokens_have_the_ids_that_the_library_gives_them() -> None:
    tree = json.loads(vocabulary("chatml"))
    tree["added_tokens"][-1]["id"] += 50
    made = FastTokenizer(json.dumps(tree).encode())
    assert {name: made.decode([token]) for name, token in made.control.items()} == {name: name for name in CHATML}


def test_rejects_a_tokenizer_whose_pieces_would_not_join() -> None:
    prefixed = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    with pytest.raises(UsageError, match="would not join"):
        FastTokenizer(changed("chatml", pre_tokenizer=prefixed))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"added_tokens": 3}', b'{"added_tokens": []}', b"\xff"])
def test_rejects_what_is_not_a_tokenizer(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a tokenizer"):
        FastTokenizer(data)
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(UsageError, match=str(tmp_path)):
        open_tokenizer(tmp_path)


def test_a_folder_holds_its_tokenizer_or_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no tokenizer"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(vocabulary("chatml"))
    opened = open_tokenizer(tmp_path)
    assert opened.hash == tokenizer("chatml").hash != tokenizer("qwen").hash
    assert opened.decode(opened.encode("a\ud800b")) == "a?b"


def test_what_is_put_around_texts_is_left_out() -> None:
    begin = {"SpecialToken": {"id": CHATML[0], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    tokens = {CHATML[0]: {"id": CHATML[0], "ids": [1500], "tokens": [CHATML[0]]}}
    template = {"type": "TemplateProcessing", "single": [begin, first], "pair": [first, second]}
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    made = FastTokenizer(changed("chatml", post_processor=template | {"special_tokens": tokens}, truncation=cut))
    text = "one two three four five six"
    assert made.encode(text) == tokenizer("chatml").encode(text)


def test_stretches_are_cut_at_the_longest_names() -> None:
    assert split_at_control("x<a>b<a>(y", {"<a>": 1, "<a>b": 2, "(": 3}) == ["x", 2, 1, 3, "y"]
    assert (split_at_control("x", {}), split_at_control("", {"(": 3})) == (["x"], [])


def test_a_format_is_found_by_the_control_tokens_of_the_tokenizer() -> None:
    assert isinstance(open_format("auto", tokenizer("harmony")), Harmony)
    assert isinstance(open_format("auto", tokenizer("qwen")), Hermes)
    assert isinstance(open_format("compact", tokenizer("chatml")), Compact)
    bare = FastTokenizer(changed("chatml", added_tokens=[]))
    for name, error, says in (
        ("auto", ConfigError, "has no format for this tokenizer"),
        ("other", ConfigError, "unknown format 'other'"),
        ("compact", UsageError, r"needs a tokenizer with <\|im_start\|>"),
        ("harmony", UsageError, "the harmony format needs"),
    ):
        with pytest.raises(error, match=says):
            open_format(name, bare)


def test_tags_that_are_tokens_are_written_as_tokens_and_in_texts_as_text() -> None:
    chat = open_format("hermes", tokenizer("qwen"))
    tags = {tokenizer("qwen").control[name] for name in TAGS}
    assert len(tags & set(chat.write("<tool_call>x</tool_call>"))) == 2
    assert tags.isdisjoint(chat.text("<tool_call>x</tool_call>"))
