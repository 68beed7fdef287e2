"""Harmony beside `openai-harmony`, over the real vocabulary: our prompts and our reading are those of the library.

The vocabulary is looked for in the folder that TIKTOKEN_ENCODINGS_BASE names, and where `tests/fetch_vocabulary.py`
puts it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai_harmony as library
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workload import PATTERN
from harness1.config import Env
from harness1.env.pieces import group_messages
from harness1.env.render import Context
from harness1.errors import UsageError
from harness1.models.formats import Harmony
from harness1.models.tokenizer import HarmonyVocabulary
from harness1.records import ModelCall, Task
from harness1.tools.registry import Toolbox
from tests.fetch_vocabulary import SHA256, VOCABULARY, checksum
from tests.support import call, make_env, run, search

FOLDER = Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", VOCABULARY.parent))
FILE = FOLDER / VOCABULARY.name
SPECS = Toolbox.of(Env()).specs
PLAIN = tuple(spec for spec in SPECS if spec.name != "curate")  # of a mapping the library writes a broken type
HOSTILE = " ".join((*Harmony.control, "汉字 a\u0301 👩🏽‍🚀 \t\r\n//x ./\n/ \x00", '{"a": "\\u0041"}'))

pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="there is no o200k_base.tiktoken: run `python tests/fetch_vocabulary.py`"
)


@pytest.fixture(scope="module", autouse=True)
def vocabulary_folder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(FOLDER))
        yield


@pytest.fixture(scope="module")
def encoding(vocabulary_folder: None) -> library.HarmonyEncoding:
    return library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def chat(vocabulary_folder: None) -> Harmony:
    return Harmony(HarmonyVocabulary())


@pytest.fixture(scope="module")
def plain() -> tiktoken.Encoding:
    lines = (line.split() for line in FILE.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("o200k", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def system_message(said: str) -> list[library.Message]:
    """The two messages that stand for our first one."""
    system = library.SystemContent.new().with_conversation_start_date("2026-04-01")
    system = system.with_reasoning_effort(library.ReasoningEffort.HIGH)
    tools = [library.ToolDescription.new(spec.name, spec.description, spec.parameters) for spec in PLAIN]
    developer = library.DeveloperContent.new().with_instructions(said.strip()).with_function_tools(tools)
    role = library.Message.from_role_and_content
    return [role(library.Role.SYSTEM, system), role(library.Role.DEVELOPER, developer)]


def conversation_of(context: Context, encoding: library.HarmonyEncoding) -> library.Conversation:
    messages: list[library.Message] = []
    for group in group_messages(context.pieces):
        text = "".join(each.text for each in group)
        if group[0].role == "system":
            messages += system_message(text)
        elif group[0].role == "user":
            messages.append(library.Message.from_role_and_content(library.Role.USER, text))
        elif group[0].call is not None:
            said = group[0].call.output_ids
            messages += encoding.parse_messages_from_completion_tokens(said, library.Role.ASSISTANT)
        else:
            name = group[0].shows.tool
            author = library.Author.new(library.Role.TOOL, f"functions.{name}")
            answer = library.Message.from_author_and_content(author, text)
            messages.append(answer.with_channel("commentary").with_recipient("assistant"))
    return library.Conversation.from_messages(messages)


def test_our_prompts_are_those_of_the_library(chat: Harmony, encoding: library.HarmonyEncoding) -> None:
    env = make_env(counter=chat)
    actions = [
        search(f"Byron {HOSTILE}"),
        call("curate", add_ids=["D1"]),
        call("verify", doc_ids=["D1"], claim="A poet."),
    ]

    async def contexts() -> list[Context | None]:
        found = [await env.reset(Task("t", f"Where did {HOSTILE} die?"))]
        for turn, action in enumerate(actions, start=1):
            spoken = ModelCall(f"{turn}.0", output_ids=chat.format_action("Look." if turn > 1 else "", action))
            found.append((await env.step([action], "", [spoken])).context)
        return found

    keep = library.RenderConversationConfig(auto_drop_analysis=False)
    for context in run(contexts()):
        theirs = encoding.render_conversation_for_completion(
            conversation_of(context, encoding), library.Role.ASSISTANT, keep
        )
        ours = [*chat.messages(group_messages(context.pieces), PLAIN), chat.prompt_end()]
        assert [token for _, ids in ours for token in ids] == theirs


@settings(max_examples=40)
@given(query=st.text(max_size=30) | st.just(HOSTILE), reasoning=st.text(max_size=20))
@pytest.mark.parametrize("header", ["spoken", "recipient in the channel", "no constraint"])
def test_our_reading_is_that_of_the_library(
    chat: Harmony, encoding: library.HarmonyEncoding, header: str, query: str, reasoning: str
) -> None:
    action = search(query)
    ids = chat.format_action(reasoning, action)
    if header != "spoken":
        start = {"recipient in the channel": "<|channel|>commentary to=functions.search_corpus <|constrain|>json"}
        body = chat.text(msgspec.json.encode(action.arguments).decode())
        opening = chat.write(start.get(header, " to=functions.search_corpus<|channel|>commentary") + "<|message|>")
        ids = (*opening, *body, chat.stop_ids[0])
    found = chat.parse(ids, SPECS)
    *thoughts, said = encoding.parse_messages_from_completion_tokens(ids, library.Role.ASSISTANT)
    assert said.recipient == f"functions.{found.actions[0].name}"
    assert msgspec.json.decode(said.content[0].text) == found.actions[0].arguments
    assert [each.content[0].text for each in thoughts] == ([found.reasoning] if thoughts else [])
    assert len(found.actions) == 1


@given(text=st.text() | st.just(HOSTILE) | st.sampled_from(Harmony.control))
def test_the_vocabulary_encodes_texts_as_texts(chat: Harmony, plain: tiktoken.Encoding, text: str) -> None:
    ids = chat.tokenizer.encode(text)
    assert ids == plain.encode_ordinary(text)
    assert set(chat.tokenizer.control.values()).isdisjoint(ids)
    assert chat.tokenizer.decode([-5, *ids, 2**40]) == text.encode("utf-8", "replace").decode()


def test_the_control_tokens_are_those_of_the_library(chat: Harmony, encoding: library.HarmonyEncoding) -> None:
    assert set(chat.stop_ids) == set(encoding.stop_tokens_for_assistant_actions()) == {200002, 200012}
    names = {chat.tokenizer.decode([token]): token for token in chat.tokenizer.control.values()}
    assert names == chat.tokenizer.control
    assert all(isinstance(chat.tokenizer.decode([token]), str) for token in range(199_990, 201_100)), "also unassigned"
    assert HarmonyVocabulary().hash == chat.tokenizer.hash
    assert checksum(FILE.read_bytes()) == SHA256


def test_reports_a_missing_vocabulary_as_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: Any) -> Any:
        raise library.HarmonyError("no network")

    monkeypatch.setattr(library, "load_harmony_encoding", absent)
    with pytest.raises(UsageError, match="set TIKTOKEN_ENCODINGS_BASE to a folder"):
        HarmonyVocabulary()
