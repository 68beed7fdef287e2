"""Sessions of a real OpenEnv server over sockets, with its own client. Run by `make test-adapters`."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness1.config import Config
from harness1.data.open import open_source
from harness1.runs.journal import latest_episodes
from tests.adapters.peers import harness1, next_call, scratch_index, serving_openenv, shown_in
from tests.support import command_process, make_env, wait_for

GenericEnvClient: Any = pytest.importorskip(
    "openenv.core.generic_client", reason="openenv is not installed"
).GenericEnvClient


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scratch_index(tmp_path_factory.mktemp("openenv"))


async def played(address: str, place: int) -> dict[str, Any]:
    client = GenericEnvClient(base_url=address)
    await client.connect()
    result = await client.reset(split="test", index=place)
    while not result.done:
        assert result.reward is None
        observation = result.observation
        name, arguments = next_call(shown_in(observation["messages"]))
        result = await client.step({"tool": name, "arguments": arguments})
    state = await client.state()
    await client.close()
    return {"reward": result.reward, "state": state, **result.observation}


def test_eight_sessions_at_once_get_the_rewards_of_an_evaluation_and_replay(tmp_path: Path, index: Path) -> None:
    async def together(address: str) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(played(address, place) for place in range(8))))

    settings = ("--set", "reward.recipe=robust", "--set", "env.rendering.order=transcript")
    with serving_openenv(str(index), "--record", str(tmp_path / "run"), *settings) as address:
        found = asyncio.run(together(address))
    harness1("replay", str(tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    rewards = {row["task"]["task_id"]: row["reward"]["total"] for row in rows}
    assert {each["state"]["task_id"]: each["reward"] for each in found} == pytest.approx(rewards)
    assert all(each["curated"] and each["stop_reason"] == "end_search" for each in found)
    assert all(each["state"]["step_count"] == len(rows[0]["turns"]) for each in found)


def test_every_episode_of_a_task_is_kept_with_its_reward_and_replays(tmp_path: Path, index: Path) -> None:
    run, told = tmp_path / "run", []
    for _ in range(2):
        with serving_openenv(str(index), "--record", str(run)) as address:
            told += [asyncio.run(played(address, 0))["reward"] for _ in range(2)]
    harness1("replay", str(run))
    found = [each for _, each in sorted(latest_episodes(run).items())]
    assert [each.sample_idx for each in found] == [0, 1, 2, 3]
    assert [each.reward.total for each in found if each.reward is not None] == pytest.approx(told)


def test_a_session_that_is_left_harms_no_other(index: Path) -> None:
    async def leaves(address: str) -> dict[str, Any]:
        for _ in range(3):
            client = GenericEnvClient(base_url=address)
            await client.connect()
            await client.reset(split="test", index=0)
            await client.close()
        return await played(address, 1)

    with serving_openenv(str(index), "--sessions", "2") as address:
        assert asyncio.run(leaves(address))["reward"] is not None


def test_clients_that_leave_without_a_word_leave_no_traceback(index: Path) -> None:
    connect = pytest.importorskip("websockets.asyncio.client").connect

    async def leave(address: str) -> None:
        for pause_s in (0.0, 0.01) * 5:
            client = await connect(f"{address.replace('http', 'ws')}/ws")
            await client.send(json.dumps({"type": "reset", "data": {"split": "test", "index": 0}}))
            await asyncio.sleep(pause_s)
            client.transport.abort()
        await asyncio.sleep(1.0)

    words = ["openenv", "--data", "world:120", "--index", str(index), "--port", "0"]
    with command_process(*words) as (process, line):
        asyncio.run(leave(line.removeprefix("OpenEnv at ").partition(",")[0]))
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""


def test_a_session_without_a_call_gives_up_its_place_and_cannot_take_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    from harness1.adapters.openenv import IDLE_S, openenv_app

    looks: list[float] = []

    class Hurried:
        """Sleeps for a moment instead."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            looks.append(seconds)
            await asyncio.sleep(0.001)

    monkeypatch.setattr("openenv.core.env_server.http_server.asyncio", Hurried())
    app = openenv_app(open_source("world:120"), make_env, Config(), sessions=1)

    def asked(client: Any, kind: str, **data: object) -> dict[str, Any]:
        client.send_json({"type": kind, "data": data})
        answer: dict[str, Any] = client.receive_json()["data"]
        return answer

    with TestClient(app) as server, server.websocket_connect("/ws") as idle:
        assert asked(idle, "reset", split="test", index=0)["observation"]
        with server.websocket_connect("/ws") as newcomer:
            assert newcomer.receive_json()["data"]["code"] == "CAPACITY_REACHED"
        later = time.time() + IDLE_S + 1.0
        monkeypatch.setattr("openenv.core.env_server.http_server.time", SimpleNamespace(time=lambda: later))
        seen = len(looks)
        wait_for(lambda: len(looks) > seen + 2)
        with server.websocket_connect("/ws") as newcomer:
            assert asked(newcomer, "reset", split="test", index=1)["observation"]
            assert "was closed" in asked(idle, "reset", split="test", index=0)["message"]
            assert asked(newcomer, "reset", split="test", index=1)["observation"]


def test_a_signal_during_a_session_ends_the_record_as_finished(tmp_path: Path, index: Path) -> None:
    run = tmp_path / "run"
    words = ["openenv", "--data", "world:120", "--index", str(index), "--port", "0", "--record", str(run)]

    async def leaves(process: subprocess.Popen[str], line: str, sent: signal.Signals) -> None:
        address = line.removeprefix("OpenEnv at ").partition(",")[0]
        await played(address, 0)
        client = GenericEnvClient(base_url=address)
        await client.connect()
        await client.reset(split="test", index=1)
        process.send_signal(sent)

    for sent, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        with command_process(*words) as (process, line):
            asyncio.run(leaves(process, line, sent))
            _, complaint = process.communicate(timeout=30)
            assert (process.returncode, "Traceback" in complaint) == (code, False), complaint
        assert json.loads((run / "stage.json").read_text())["status"] == "finished"


def test_an_index_that_dies_is_an_error_and_no_reward(index: Path) -> None:
    async def plays(address: str, retriever: subprocess.Popen[str]) -> None:
        client = GenericEnvClient(base_url=address)
        await client.connect()
        await client.reset(split="test", index=0)
        retriever.kill()
        retriever.wait()
        with pytest.raises(RuntimeError, match="invalid"):
            await client.step({"tool": "search_corpus", "arguments": {"query": "x"}})
        await client.close()

    with command_process("retrieve", "--index", str(index), "--port", "0") as (retriever, line):
        remote = line.partition(" at ")[2].partition(": ")[0]
        with serving_openenv(remote, "--set", "machine.attempts=1", "--set", "machine.call_deadline_s=1") as address:
            asyncio.run(plays(address, retriever))


def test_a_taken_port_is_told_in_one_line_and_nothing_is_announced(index: Path) -> None:
    words = [sys.executable, "-m", "harness1", "serve", "openenv", "--data", "world:120", "--index", str(index)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run([*words, "--port", str(port)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_index_without_a_task_is_answered_with_those_that_exist(index: Path) -> None:
    last = len(open_source("world:120").tasks("test")) - 1

    async def asks(address: str, says: str, **wrong: object) -> None:
        client = GenericEnvClient(base_url=address)
        await client.connect()
        with pytest.raises(RuntimeError, match=says):
            await client.reset(split="test", **wrong)
        await client.close()

    with serving_openenv(str(index)) as address:
        for wrong in ("abc", -1, 1.5, 10**6, 10**400, {"a": 1}):
            asyncio.run(asks(address, rf"the indexes are 0 to {last}", index=wrong))
        for query in ({"text": "who?"}, ["who?"], 7, " ", "x" * 9000):
            asyncio.run(asks(address, "a query is a text of 1 to 8,192 characters", query=query))


def test_its_own_validation_accepts_the_server(index: Path) -> None:
    with serving_openenv(str(index)) as address:
        words = [str(Path(sys.executable).parent / "openenv"), "validate", "--url", address, "--json"]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
    report = json.loads(ended.stdout[ended.stdout.index("{") :])
    print(json.dumps(report)[:3000])
    assert ended.returncode == 0
