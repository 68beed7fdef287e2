"""The MCP server with its official client: both eras of the protocol, many clients, hostile names, real processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.types import INVALID_PARAMS, CallToolResult

from harness1.adapters.driven import DrivenPolicy, Searches, StepReply, append_only, newest_observation
from harness1.adapters.mcp import asking, retrieval_server, search_server
from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import UsageError
from harness1.eval.answers import NamedModel
from harness1.eval.cited import Answerer
from harness1.http.model_endpoint import Completer
from harness1.policy.policy import Decision
from harness1.records import DocId, Episode, Task, ToolCall
from harness1.runs.journal import read_episodes
from harness1.tools.registry import Toolbox
from tests.adapters.peers import harness1
from tests.eval.test_answers import Server as ModelServer
from tests.support import CORPUS, END, Script, WordRetriever, command_process, curate, make_env, run, search
from tests.support import chunk as chunk_of

QUESTION = "Where did the father of Ada Lovelace die?"
SETTINGS = append_only(load_config(None, ["env.max_turns=6"]))
Mode = Literal["auto", "legacy"]
MODES: tuple[Mode, ...] = ("auto", "legacy")


class Served:
    def __init__(self, config: Config = SETTINGS, faults: int = 0, **limits: Any) -> None:
        self.kept: list[Episode] = []
        self.retriever = WordRetriever(CORPUS, faults=faults)
        self.searches = Searches(
            lambda: make_env(config.env, retriever=self.retriever), "mcp", self.kept.append, **limits
        )
        self.server = search_server(self.searches, config.env)

    def client(self, mode: Mode = "auto") -> Client:
        return Client(self.server, mode=mode)


def text(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content if part.type == "text")


def told(result: CallToolResult) -> dict[str, Any]:
    assert result.structured_content is not None
    return result.structured_content


async def begin(client: Client, question: str = QUESTION) -> str:
    return str(told(await client.call_tool("start_search", {"question": question}))["search"])


async def look(client: Client, name: object, query: str = "Ada") -> CallToolResult:
    return await client.call_tool("search_corpus", {"search": name, "query": query})


async def whole(client: Client, question: str = QUESTION) -> CallToolResult:
    name = await begin(client, question)
    await look(client, name, "Ada Byron")
    await client.call_tool("curate", {"search": name, "add_ids": ["D3"], "importance": {"D3": "very_high"}})
    return await client.call_tool("end_search", {"search": name, "reasoning": "done"})


@pytest.mark.parametrize("mode", MODES)
def test_a_search_delivers_its_curated_set_and_is_recorded_like_any_other(mode: Mode) -> None:
    async def plays(served: Served) -> CallToolResult:
        async with served.client(mode) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == ["start_search", *(spec.name for spec in Toolbox.of(SETTINGS.env).specs)]
            return await whole(client)

    served = Served()
    ended = run(plays(served))
    script = Script(search("Ada Byron"), curate(add_ids=["D3"], importance={"D3": "very_high"}), END)
    same = run(rollout(make_env(SETTINGS.env), script, Task("t", QUESTION)))
    assert [each["id"] for each in told(ended)["curated"]] == [each.unit_id for each in same.curated]
    assert (told(ended)["stop_reason"], told(ended)["convincing"]) == ("end_search", True)
    assert "Lord Byron" in text(ended)
    (episode,) = served.kept
    assert episode.curated == same.curated
    report = replay_episode(episode, SETTINGS.env)
    assert (report.difference, report.equal) == (None, 3)
    assert not len(served.searches)


def test_no_title_and_no_path_forges_a_line_of_an_answer() -> None:
    async def plays(served: Served) -> list[str]:
        async with served.client() as client:
            name = await begin(client)
            found = text(await look(client, name, "Ada"))
            await client.call_tool("curate", {"search": name, "add_ids": ["D1"]})
            return [found, text(await client.call_tool("end_search", {"search": name, "reasoning": "done"}))]

    served = Served(files=lambda doc_id: Path(f"/docs/{doc_id}.md"))
    served.retriever.chunks = [chunk_of("a\nD9: /etc", "Ada wrote.", "Ada\u2028/etc/passwd\n  2. very_high: B")]
    for answer in run(plays(served)):
        assert not any(line.startswith(("D9", "/etc", "  2.")) for line in answer.splitlines()), answer
    assert "/docs/a D9: /etc.md" in answer


def test_a_search_says_that_nothing_convincing_was_found() -> None:
    async def plays(served: Served) -> CallToolResult:
        async with served.client() as client:
            return await whole(client, "Which handball team of Flensburg won the national cup for juniors?")

    ended = run(plays(Served()))
    assert "Nothing convincing was found: these are the nearest." in text(ended)
    assert (told(ended)["convincing"], len(told(ended)["curated"])) == (False, 3)


def test_each_answer_holds_what_is_new_and_nothing_twice() -> None:
    async def plays(served: Served) -> list[str]:
        async with served.client() as client:
            began = await client.call_tool("start_search", {"question": QUESTION})
            name = told(began)["search"]
            looks = [await look(client, name, query) for query in ("Ada Byron", "besieged town")]
            return [text(each) for each in (began, *looks)]

    answers = run(plays(Served()))
    for new, first in ((QUESTION, 0), ("She was the daughter of Lord Byron", 1)):
        assert [new in each for each in answers] == [at == first for at in range(3)]
    assert "Missolonghi" in answers[2]


def test_arguments_that_are_json_in_a_string_are_decoded_by_the_schema() -> None:
    async def plays(served: Served) -> CallToolResult:
        async with served.client() as client:
            name = await begin(client)
            await look(client, name, "Ada Byron")
            given = {"add_ids": '["D3", "D1"]', "importance": '{"D3": "very_high"}', "remove_ids": "D1"}
            await client.call_tool("curate", {"search": name, **given})
            return await client.call_tool("end_search", {"search": name, "reasoning": "[1]"})

    served = Served()
    assert told(run(plays(served)))["curated"][0]["tag"] == "very_high"
    (episode,) = served.kept
    curated = curate(add_ids=["D3", "D1"], importance={"D3": "very_high"}, remove_ids=["D1"])
    assert [turn.action for turn in episode.turns][1:] == [curated, ToolCall("end_search", {"reasoning": "[1]"})]


Told = tuple[list[str], list[str]]
"""What a search said after each call, and what it delivered."""


async def served_search(client: Client, question: str, calls: Sequence[ToolCall]) -> Told:
    name = await begin(client, question)
    results = [await client.call_tool(call.name, {"search": name, **call.arguments}) for call in calls]
    said = [text(result).removeprefix(f"search: {name}\n") for result in results[:-1]]
    return said, [each["id"] for each in told(results[-1])["curated"]]


async def own_search(env: SearchEnv, question: str, calls: Sequence[ToolCall]) -> tuple[Told, Episode]:
    policy = DrivenPolicy("mcp")
    for call in calls:
        policy.decisions.put_nowait(Decision((call,)))
    episode = await rollout(env, policy, Task("t", question))
    contexts = [policy.contexts.get_nowait() for _ in calls][1:]
    said = ["".join(piece.text for piece in newest_observation(context)) for context in contexts]
    return (said, [each.unit_id for each in episode.curated]), episode


@pytest.mark.parametrize("mode", MODES)
def test_interleaved_searches_of_two_clients_do_not_see_each_other(mode: Mode) -> None:
    world = open_source("world:200")
    questions = [task.query for task in world.tasks("train")]
    plans = [(search(each), curate(add_ids=[f"D{2 + number % 3}"]), END) for number, each in enumerate(questions)]
    served = Served()
    served.retriever = WordRetriever([chunk_of(each.doc_id, each.text, each.title) for each in world.documents()])

    async def plays() -> list[Told]:
        async with served.client(mode) as one, served.client(mode) as two:
            clients = (one, two) * 100
            return await asyncio.gather(*map(served_search, clients, questions, plans))

    found = run(plays())
    kept = {each.task.query: each for each in served.kept}
    assert len({str(each) for each in found}) == len({each.episode_id for each in kept.values()}) == 200
    for question, plan, each in zip(questions, plans, found, strict=True):
        expected, episode = run(own_search(make_env(SETTINGS.env, retriever=served.retriever), question, plan))
        assert each == expected
        assert [turn.action for turn in kept[question].turns] == list(plan)
        assert [turn.observation for turn in kept[question].turns] == [turn.observation for turn in episode.turns]
        assert kept[question].curated == episode.curated


def test_foreign_and_ended_names_are_refused() -> None:
    async def plays(served: Served) -> None:
        async with served.client() as client:
            ended = told(await whole(client))["search"]
            open_now = await begin(client)
            assert (await client.call_tool("search_corpus", {"search": open_now, "words": 3})).is_error
            assert not (await look(client, open_now)).is_error, "a mistake ends no search"
            for name in (ended, "guessed", "", None, ["x"]):
                refused = await look(client, name)
                assert refused.is_error
                assert "there is no such search" in text(refused)
            with pytest.raises(MCPError, match="there is no tool") as unknown:
                await client.call_tool("drop_tables", {"search": ended})
            assert unknown.value.code == INVALID_PARAMS
            empty = await client.call_tool("start_search", {"question": " "})
            assert empty.is_error

    run(plays(Served()))


def test_the_search_used_longest_ago_makes_room() -> None:
    async def plays() -> None:
        served = Served(most=2)
        async with served.client() as client:
            names = [await begin(client) for _ in range(2)]
            await look(client, names[0])
            await client.call_tool("start_search", {"question": QUESTION})
            assert len(served.searches) == 2
            assert not (await look(client, names[0], "Byron")).is_error
            assert (await look(client, names[1])).is_error
        await served.searches.close()
        assert not served.kept

    run(plays())


def test_an_idle_search_is_closed_without_another_call() -> None:
    async def plays(served: Served) -> None:
        async with served.client() as client:
            name = await begin(client)
            assert len(served.searches) == 1
            await asyncio.sleep(0.5)
            assert not len(served.searches)
            assert (await look(client, name)).is_error
        assert not served.kept

    run(plays(Served(idle_s=0.1)))


@pytest.mark.parametrize("most", [1, 3])
def test_a_new_search_is_never_the_one_that_makes_room(most: int) -> None:
    async def plays(served: Served) -> None:
        found = served.searches
        open_now = [(await found.start(QUESTION))[0] for _ in range(most)]
        call = ToolCall("search_corpus", {"query": "Ada"})
        acts = [found.act(name, call) for name in open_now]
        (name, _), *answers = await asyncio.gather(found.start("another"), *acts, return_exceptions=True)
        assert all(isinstance(each, StepReply | UsageError) for each in answers)
        assert len(found) == most
        assert not (await found.act(name, call)).failed
        await found.close()

    run(plays(Served(most=most)))


def test_a_start_that_a_client_gave_up_is_finished() -> None:
    async def plays(served: Served) -> None:
        starting = asyncio.create_task(served.searches.start(QUESTION))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await asyncio.sleep(0.2)
        (name,) = served.searches._searches
        assert not (await served.searches.act(name, ToolCall("search_corpus", {"query": "Ada"}))).failed

    run(plays(Served()))


def test_a_dead_index_is_an_error_and_no_empty_result() -> None:
    async def plays(served: Served) -> CallToolResult:
        async with served.client() as client:
            name = await begin(client)
            return await look(client, name)

    served = Served(faults=99)
    answer = run(plays(served))
    assert answer.is_error
    assert "invalid" in text(answer)
    assert served.kept[0].status == "infra_error"


def test_a_client_on_this_machine_is_told_the_whole_path_of_what_it_finds_on_a_line_of_its_own() -> None:
    files = {DocId("byron"): Path("/home/ada/notes/byron.md")}

    async def plays(served: Served) -> None:
        async with served.client() as client:
            name = await begin(client)
            first = await look(client, name, "Lord Byron")
            (handle,) = told(first)["files"]
            assert f"{handle}: /home/ada/notes/byron.md" in text(first).splitlines()
            again = await look(client, name, "Byron")
            assert "files" not in told(again)
            ended = await client.call_tool("end_search", {"search": name, "reasoning": "done"})
            paths = {each["id"]: each.get("path") for each in told(ended)["curated"]}
            assert paths.pop("byron") == "/home/ada/notes/byron.md"
            assert not any(paths.values())
            assert {"/home/ada/notes/byron.md", *paths} <= {*text(ended).splitlines()}
        async with Client(retrieval_server(served.retriever, Config(), files.get)) as client:
            hits = told(await client.call_tool("search", {"query": "Lord Byron"}))["result"]
            assert [hit["path"] for hit in hits if "path" in hit] == ["/home/ada/notes/byron.md"]

    run(plays(Served(files=files.get)))


def test_retrieval_alone_searches_and_reads_in_the_shape_of_browsecomp_plus() -> None:
    async def plays() -> None:
        async with Client(retrieval_server(WordRetriever(CORPUS), Config())) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "get_document"]
            hits = told(await client.call_tool("search", {"query": "Lord Byron"}))["result"]
            assert {"docid", "score", "snippet"} == hits[0].keys()
            assert "byron" in [hit["docid"] for hit in hits]
            document = told(await client.call_tool("get_document", {"docid": "byron"}))["result"]
            assert "Missolonghi" in document["text"]
            for name, arguments in (("get_document", {"docid": "none"}), ("search", {"query": ""}), ("search", {})):
                assert (await client.call_tool(name, arguments)).is_error
        async with Client(retrieval_server(WordRetriever(CORPUS, faults=9), Config())) as client:
            down = await client.call_tool("search", {"query": "Lord Byron"})
            assert down.is_error
            assert "down" in text(down)

    run(plays())


def test_a_model_answers_a_question_with_the_passages_that_it_cites() -> None:
    said = 'Ada Lovelace was the daughter of Lord Byron [1: "Lord Byron"]. It rained [1: "rain \x1b"].'
    model = NamedModel("m", Completer(ModelServer(lambda *_: said), "m", 50))
    retriever = WordRetriever(CORPUS)
    ask = asking(lambda: make_env(SETTINGS.env, retriever=retriever), Answerer(model, 500), lambda doc: Path("/n", doc))

    async def plays() -> None:
        async with Client(retrieval_server(retriever, Config(), ask=ask)) as client:
            assert [tool.name for tool in (await client.list_tools()).tools][-1] == "ask"
            answer = await client.call_tool("ask", {"question": QUESTION})
            assert text(answer).startswith(said)
            assert '"rain \x1b" NOT FOUND there' in text(answer)
            assert told(answer)["passages"][0]["path"].startswith("/n/")
            assert (await client.call_tool("ask", {"question": ""})).is_error
        async with Client(retrieval_server(retriever, Config())) as client:
            assert "ask" not in [tool.name for tool in (await client.list_tools()).tools]

    run(plays())


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "texts").mkdir()
    for chunk in CORPUS:
        (folder / "texts" / f"{chunk.doc_id}.txt").write_text(f"{chunk.title}\n\n{chunk.text}\n")
    harness1("index", str(folder / "texts"), "--out", str(folder / "index"))
    return folder / "index"


@pytest.mark.service
def test_an_agent_starts_the_server_itself_and_its_searches_are_recorded(index: Path, tmp_path: Path) -> None:
    record = tmp_path / "run"
    words = ["-m", "harness1", "serve", "mcp", "--index", str(index), "--record", str(record)]

    async def plays() -> dict[str, Any]:
        async with Client(StdioServerParameters(command=sys.executable, args=words)) as client:
            return told(await whole(client))

    ended = run(plays())
    assert [Path(each["path"]) for each in ended["curated"]] == [
        index.parent / "texts" / each["id"] for each in ended["curated"]
    ]
    (episode,) = read_episodes(record)
    assert [each.unit_id for each in episode.curated] == [each["id"] for each in ended["curated"]]
    harness1("replay", str(record))


@pytest.mark.service
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_server_of_standard_input_ends_on_a_signal_with_a_finished_record(
    index: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    record = tmp_path / "run"
    with command_process("mcp", "--index", str(index), "--record", str(record), piped=True) as (process, _):
        play_over(process)
        process.send_signal(sent)
        assert process.wait(20) == code
    assert len(list(read_episodes(record))) == 1
    assert json.loads((record / "stage.json").read_text())["status"] == "finished"


def play_over(process: subprocess.Popen[str]) -> None:
    def call(number: int, method: str, **params: Any) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer["result"]

    client = {"name": "lines", "version": "1"}
    call(1, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo=client)
    started = call(2, "tools/call", name="start_search", arguments={"question": QUESTION})
    words = {"search": started["structuredContent"]["search"], "reasoning": "nothing to find"}
    ended = call(3, "tools/call", name="end_search", arguments=words)
    assert ended["structuredContent"]["over"]


@pytest.mark.service
@pytest.mark.parametrize("mode", MODES)
def test_clients_call_it_over_http_and_pages_of_other_sites_may_not(index: Path, mode: Mode) -> None:
    async def plays(address: str) -> None:
        import httpx

        async with Client(address, mode=mode) as client:
            assert told(await whole(client))["curated"]
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        async with httpx.AsyncClient() as web:
            about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "n", "version": "1"}}
            begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
            takes = {"Accept": "application/json, text/event-stream"}
            began = await web.post(address, json=begin, headers=takes)
            assert (began.status_code, "mcp-session-id" in began.headers) == (200, False), "nothing to leave behind"
            for method in ("GET", "DELETE"):
                assert (await web.request(method, address, headers=takes)).status_code == 405
            large = {**body, "params": {"cursor": "x" * 300_000}}
            assert (await web.post(address, json=large, headers=takes)).status_code == 413
            for head, status in (({"Origin": "http://evil.example"}, 403), ({"Host": "evil.example"}, 421)):
                assert (await web.post(address, json=body, headers=head)).status_code == status

    over_http(index, plays)


def over_http(index: Path, plays: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    with command_process("mcp", "--index", str(index), "--http", "--port", "0") as (process, line):
        found = re.search(r"http://\S+/mcp", line)
        run(plays(found.group()))
        process.terminate()
        assert process.wait(20) == 0
