"""Schemas and validation come from the typed functions; a mechanism that is off is in no schema."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_args

import pytest
from msgspec import Meta

from harness1.config import Env, load_config
from harness1.config.env import ToolName, read_env
from harness1.env.environment import env_hash
from harness1.errors import ConfigError
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Observation, ToolCall
from harness1.tools.registry import NAMES, TOOLS, Toolbox
from harness1.tools.tool import Needs, build_tool
from tests.support import make_env, play, text_of

BOX = Toolbox.of(Env())


def example(
    memory: WorkingMemory,
    env: Env,
    word: Annotated[str, Meta(description="A word.", max_length=5)],
    count: Annotated[int, Meta(description="How often.")] = 2,
    extra: Annotated[str, Meta(description="Only with tags."), Needs(lambda env: env.has("tags"))] = "",
) -> Observation:
    """Say a word.

    This paragraph is for programmers.
    """
    return Observation(f"{word}*{count}{extra}")


def outcome(arguments: Any) -> Observation:
    tool = build_tool(example, Env())
    with pytest.raises(StopIteration) as stop:
        next(tool.run(WorkingMemory.empty("q", "document"), Env(), ToolCall("example", arguments)))
    result: Observation = stop.value.value
    return result


def test_name_description_and_parameters_are_those_of_the_function_where_their_condition_holds() -> None:
    spec = build_tool(example, Env()).spec
    assert (spec.name, spec.description) == ("example", "Say a word.")
    assert spec.parameters["required"] == ["word"]
    assert spec.parameters["additionalProperties"] is False
    assert spec.parameters["properties"]["word"] == {"type": "string", "maxLength": 5, "description": "A word."}
    assert spec.parameters["properties"]["count"]["default"] == 2
    without = build_tool(example, Env().switch(tags=False)).spec
    assert (list(without.parameters["properties"]), outcome({"word": "hi"}).tool) == (["word", "count"], "hi*2")


def test_bad_arguments_are_an_observation_that_names_the_parameters() -> None:
    words: tuple[Any, ...] = ({}, {"word": 3}, {"word": "toolong"}, {"word": None})
    for arguments in (*words, {"word": "a", "x": 1}, {"word": "a", "count": "2"}):
        error = outcome(arguments).error
        assert (error.code, error.data["parameters"]) == ("bad_arguments", "word, count, extra")


@pytest.mark.parametrize("tool", [*TOOLS], ids=lambda function: function.__name__)
def test_every_tool_is_described_with_all_its_parameters(tool: Any) -> None:
    spec = Toolbox.of(Env().switch(pruning=True)).tools[tool.__name__].spec
    assert inspect.getdoc(tool)
    assert len(spec.description) > 20
    parameters = [name for name in inspect.signature(tool).parameters if name not in ("memory", "env")]
    assert list(spec.parameters["properties"]) == parameters
    for schema in spec.parameters["properties"].values():
        assert schema.get("description"), spec.name
        assert "$ref" not in str(schema)


def test_the_tools_are_the_published_ones_and_what_they_require() -> None:
    required = {"fan_out_search": ["queries"], "search_corpus": ["query"], "grep_corpus": ["pattern"]}
    required |= {"read_document": ["doc_id"], "review_docs": ["doc_ids"], "verify": ["doc_ids", "claim"]}
    required |= {"curate": [], "end_search": []}
    assert {name: tool.spec.parameters["required"] for name, tool in BOX.tools.items()} == required


OFF = {"fan_out": "fan_out_search", "grep": "grep_corpus", "read": "read_document", "review": "review_docs"}


@pytest.mark.parametrize(("group", "name"), [*OFF.items(), ("verification", "verify")])
def test_a_tool_that_is_off_does_not_exist(group: str, name: str) -> None:
    env = load_config(None, [f"env.{group}.on=false"]).env
    assert [spec.name for spec in Toolbox.of(env).specs] == [tool for tool in BOX.tools if tool != name]
    step = play(make_env(env), ToolCall(name, {}))[0]
    assert f"there is no tool {name!r}. Use one of: " in text_of(step.context)


def test_a_configuration_may_offer_some_tools_alone() -> None:
    assert {*get_args(ToolName)} == NAMES - {"end_search"}
    some = Env(tools=("search_corpus", "curate", "search_corpus"))
    assert [*Toolbox.of(some).tools] == ["search_corpus", "curate", "end_search"]
    assert env_hash(some) == env_hash(Env(tools=("curate", "search_corpus"))) != env_hash(Env())
    assert read_env(some.plain()) == some
    assert "tools" not in Env().plain()
    with pytest.raises(ConfigError, match="the mechanisms offer none of grep_corpus"):
        Toolbox.of(Env(tools=("grep_corpus",)).switch(grep=False))
