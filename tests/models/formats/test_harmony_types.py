"""Tools of anybody's are declared in Harmony, whatever their schemas say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.tools.tool import ToolSpec
from tests.vocabularies import chat_format, tokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "array", "string", "null", "integer"]) | st.lists(st.just("string"))},
    optional={"items": JSON, "additionalProperties": JSON, "enum": JSON, "default": JSON, "properties": JSON},
)


@pytest.mark.parametrize(
    ("schema", "type_"),
    [
        ({"type": "object", "additionalProperties": True}, "{ [key: string]: any }"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "{ [key: string]: string }"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}, "{ a: number[] }"),
        ({"enum": ["a", 1]}, '"a" | 1'),
        ({}, "any"),
    ],
)
def test_a_schema_is_a_type(schema: dict[str, object], type_: str) -> None:
    spec = ToolSpec("tool", "Does it.", {"type": "object", "properties": {"x": schema}})
    declared = tokenizer("harmony").decode(chat_format("harmony", "harmony").declarations([spec]))
    assert f"x?: {type_}," in declared


@given(SCHEMAS)
def test_no_schema_is_too_strange(schema: dict[str, object]) -> None:
    spec = ToolSpec("tool", "Does it.", {"type": "object", "properties": {"x": schema}})
    assert chat_format("harmony", "harmony").declarations([spec])
