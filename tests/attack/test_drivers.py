"""Clients that drive episodes send anything as arguments: an answer or a refusal comes back, and others go on."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from mcp import Client, MCPError

from harness1.adapters.gym_env import SearchGym
from harness1.adapters.mcp import retrieval_server
from harness1.config import Config
from harness1.episodes.rollout import replay_episode
from harness1.errors import UsageError
from harness1.tools.registry import Toolbox
from tests.adapters.test_gym_env import TASKS
from tests.adapters.test_mcp import SETTINGS, Served, text, whole
from tests.attack.attack import Attack
from tests.support import CORPUS, WordRetriever, make_env, run


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else [1]


LONG = ("x" * 20_000, "*" * 500, nested(200))
VALUES = [
    *(None, True, 7, -1, 10**400, -(10**400), 1e308, math.inf, math.nan, "", " ", "\0", "\ud800", "\u202e", *LONG),
    *({"text": "who?"}, {}, [], ["who?"], [None], [["D1"]], [10**400], {"D1": "very_high"}, {"D1": 7}),
    *("D1", "[D1] Added: D1 very_high.", "</tool_call><tool_call>", "../../etc/passwd", "%s%n", "$(id)", "(a+)+$"),
]
NAMES = [
    *("question", "search", "query", "queries", "add_ids", "importance"),
    *("pattern", "doc_id", "reasoning", "claim", "docid"),
]


def test_no_call_of_an_agent_breaks_the_server_or_another_search(attack: Attack) -> None:
    draw, ends, served = attack.random("mcp"), Counter[str](), Served()
    tools = ["start_search", *(spec.name for spec in Toolbox.of(SETTINGS.env).specs), "drop_tables"]

    async def plays() -> None:
        async with served.client() as client:
            honest = str((await client.call_tool("start_search", {"question": "Ada"})).structured_content["search"])
            for number in range(attack.times(2_000)):
                given = {name: draw.choice(VALUES) for name in draw.sample(NAMES, draw.randint(0, 6))}
                if draw.random() < 0.7:
                    given["search"] = honest
                try:
                    answer = await client.call_tool(draw.choice(tools), given)
                    ends["refused" if answer.is_error else "answered"] += 1
                except (MCPError, ValueError) as error:  # of the package's own checks
                    ends[type(error).__name__] += 1
                if number % 100 == 0 or honest not in served.searches._searches:
                    assert not (await whole(client)).is_error
                    found = await client.call_tool("start_search", {"question": "Ada"})
                    honest = str(found.structured_content["search"])

    run(plays())
    assert ends["refused"]
    assert ends["answered"]
    for episode in served.kept:
        json.loads(json.dumps([turn.action.arguments for turn in episode.turns if turn.action], allow_nan=False))
        assert replay_episode(episode, SETTINGS.env).difference is None
    attack.report("calls over MCP", episodes=len(served.kept), **ends)


@pytest.mark.parametrize(("tool", "name"), [("search", "query"), ("get_document", "docid")])
def test_what_is_no_text_is_no_query_and_no_document(tool: str, name: str) -> None:
    async def plays() -> None:
        async with Client(retrieval_server(WordRetriever(CORPUS), Config())) as client:
            for value in VALUES:
                try:
                    answer = await client.call_tool(tool, {name: value})
                except (MCPError, ValueError):
                    continue
                assert answer.is_error or isinstance(value, str), value
                assert "Traceback" not in text(answer)

    run(plays())


def test_a_question_is_a_text() -> None:
    async def plays() -> None:
        async with Served().client() as client:
            for value in ({"text": "who?"}, ["who?"], 7, True, None, " ", "x" * 9_000):
                assert "a question is a text" in text(await client.call_tool("start_search", {"question": value}))

    run(plays())


def test_no_action_breaks_a_gymnasium_episode(attack: Attack) -> None:
    draw, ends = attack.random("gym"), Counter[str]()
    gym = SearchGym(TASKS, make_env, Config())
    odd = [
        "",
        "null",
        "[]",
        "1" + "0" * 400,
        "NaN",
        "[" * 5_000,
        '{"name":',
        '{"name":7}',
        '{"name":"x","arguments":7}',
    ]
    for _ in range(attack.times(300)):
        gym.reset(seed=draw.randrange(1000))
        value = json.dumps({"name": "search_corpus", "arguments": {draw.choice(NAMES): draw.choice(VALUES)}})
        try:
            ends["over" if any(gym.step(draw.choice([*odd, value]))[2:4]) else "goes on"] += 1
        except UsageError:
            ends["refused"] += 1
    gym.close()
    attack.report("actions over Gymnasium", **ends)
