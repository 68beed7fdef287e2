"""The client of our own route: what it finds is what the served retriever finds, and what fails is a fault."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.errors import ConfigError, InfrastructureFault
from harness1.http.client import CONNECTIONS
from harness1.policy.registry import open_policy
from harness1.records import ChunkId, DocId, Status, Task
from harness1.retrieval import open as opening
from harness1.retrieval.engines.remote import About, RemoteRetriever, SearchR1Retriever
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, SearchRequest, SearchResult
from harness1.runs.journal import read_episodes
from tests.serving import HOST, imitating, process_serving, serving
from tests.support import CORPUS, WordRetriever, make_env, run

OPTIONS = ["machine.attempts=2", "machine.call_deadline_s=5.0"]
QUICK = load_config(None, OPTIONS)
NO_GREP = load_config(None, [*OPTIONS, "env.grep.on=false"])
FOUND = b'{"result":[[{"document":{"id":"7","contents":"Title\\nText"},"score":1.0}]]}'


def opened(spec: str, config: Config = QUICK) -> Any:
    """The client alone, without the cache in front of it."""
    return opening._open(*opening.split_engine(spec), config)


def about(config: Config = QUICK) -> About:
    return About(IndexInfo("word-index", "document", 5, 5), config.env.retrieval)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as held:
        return int(held.getsockname()[1])


def one(retriever: RemoteRetriever, query: str, deadline: float = 5.0) -> SearchResult | RetrievalFault:
    (found,) = run(retriever.search([SearchRequest(query, 3, deadline=deadline)]))
    return found


def test_what_is_found_over_the_wire_is_what_the_served_retriever_finds() -> None:
    direct = WordRetriever(CORPUS)
    requests = [
        SearchRequest("the poet ada", 2),
        SearchRequest("the poet ada", 10, frozenset({ChunkId("ada#0"), ChunkId("\ud800")})),
        SearchRequest("\ud800 poet", 1),
        SearchRequest("unheard", 3),
        SearchRequest("poet", 0),
        SearchRequest(" ", 3),
    ]
    with serving(direct) as url:
        remote = opened(url)
        assert isinstance(remote, RemoteRetriever)
        assert remote.info == direct.info
        assert run(remote.search(requests)) == run(direct.search(requests))
        assert run(remote.search([])) == []
        assert run(remote.search([SearchRequest("poet", -1)])) == [SearchResult()]
        assert run(remote.grep("Missolonghi", 1, 5.0)) == run(direct.grep("Missolonghi", 1, 5.0))
        assert run(remote.grep("absent", 1, 5.0)) == ()
        assert run(remote.grep("(", 1, 5.0)) == run(direct.grep("(", 1, 5.0))
        assert isinstance(run(remote.grep("\ud800", 1, 5.0)), BadPattern)
        for name in ("ada", "nobody", "\ud800"):
            assert run(remote.read(DocId(name))) == run(direct.read(DocId(name)))
        ids = [ChunkId("miss#0"), ChunkId("\ud800"), ChunkId("none")]
        assert run(remote.get(ids)) == run(direct.get(ids)) != ()


def test_an_episode_over_the_wire_is_the_episode_over_the_retriever_itself() -> None:
    task = Task("task", "Where did the father of Ada Lovelace die?")
    near = make_env()
    with serving(WordRetriever(CORPUS)) as url:
        far = SearchEnv(Config().env, opened(url), machine=QUICK.machine)
        here, there = (run(rollout(env, open_policy("scripted", {}), task)) for env in (near, far))
    assert there.status is Status.COMPLETED
    assert msgspec.structs.replace(there, stage_ms={}) == msgspec.structs.replace(here, stage_ms={})


def test_a_fault_of_one_query_leaves_the_others() -> None:
    with serving(WordRetriever(CORPUS, faults=1)) as url:
        found = run(opened(url).search([SearchRequest("ada", 1), SearchRequest("ada", 1)]))
    assert found[0] == RetrievalFault("down")
    assert isinstance(found[1], SearchResult)


def test_every_loop_has_its_session_and_leaves_nothing_open(caplog: pytest.LogCaptureFixture) -> None:
    with serving(WordRetriever(CORPUS)) as url, warnings.catch_warnings():
        warnings.simplefilter("error")
        remote = opened(url)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            assert isinstance(one(remote, "ada"), SearchResult)
            asyncio.run(_cut_short(remote))
        gc.collect()
        time.sleep(0.1)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert not caplog.records


async def _cut_short(remote: RemoteRetriever) -> None:
    """A loop that ends while a call is on its way."""
    task = asyncio.create_task(remote.search([SearchRequest("ada", 1)]))
    await asyncio.sleep(0.002)
    assert task is not None


def test_connections_to_a_server_are_bounded() -> None:
    class Counting(WordRetriever):
        inside = most = 0

        async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0.05)
            self.inside -= 1
            return await super().search(requests)

    async def crowd(remote: RemoteRetriever) -> list[Any]:
        return await asyncio.gather(*(remote.search([SearchRequest("ada", 1)]) for _ in range(100)))

    retriever = Counting(CORPUS)
    with serving(retriever) as url:
        found = run(crowd(opened(url)))
    assert all(isinstance(result, SearchResult) for (result,) in found)
    assert 10 < retriever.most <= CONNECTIONS


def test_a_server_that_goes_is_a_fault_and_one_that_comes_back_answers_again() -> None:
    with serving(WordRetriever(CORPUS)) as url:
        remote = opened(url)
        assert isinstance(one(remote, "ada"), SearchResult)
    port = int(url.rsplit(":", 1)[1])
    fault = one(remote, "ada")
    assert isinstance(fault, RetrievalFault)
    assert url in fault.message
    for call in (remote.grep("a", 1, 1.0), remote.read(DocId("ada")), remote.get([ChunkId("ada#0")])):
        assert isinstance(run(call), RetrievalFault)
    with serving(WordRetriever(CORPUS), port=port):
        assert isinstance(one(remote, "ada"), SearchResult)


def test_a_server_that_comes_back_with_another_index_or_ranking_is_a_fault() -> None:
    with serving(WordRetriever(CORPUS)) as url:
        remote = opened(url)
    port = int(url.rsplit(":", 1)[1])
    with serving(WordRetriever(CORPUS), load_config(None, ["env.retrieval.mode=bm25"]), port=port):
        fault = one(remote, "ada")
        assert isinstance(fault, RetrievalFault)
        assert "409" in fault.message
    other = WordRetriever(CORPUS)
    other.info = IndexInfo("other", "document", 5, 5)
    with serving(other, port=port):
        assert isinstance(one(remote, "ada"), RetrievalFault)
        assert isinstance(run(remote.read(DocId("ada"))), RetrievalFault)


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, b"<html>", "malformed"),
        (200, b"{}", "answers"),
        (200, b'{"answers":[]}', "0 answers"),
        (200, b'{"answers":[{}]}', "neither"),
        (200, b'{"answers":[{"result":{"hits":[{"chunk":1}]}}]}', "hits[0].chunk"),
        (500, b"Internal Server Error", "500 Internal"),
        (503, b'{"error":"too many calls"}', "503 too many calls"),
    ],
)
def test_an_answer_that_is_none_is_a_fault_and_never_no_result(status: int, answer: bytes, says: str) -> None:
    with imitating(lambda *_: (status, answer)) as url:
        remote = RemoteRetriever(url, about(), QUICK.machine)
        fault = one(remote, "ada")
        assert isinstance(fault, RetrievalFault)
        assert says in fault.message
        for call in (remote.grep("a", 1, 5.0), remote.read(DocId("a")), remote.get([ChunkId("a")])):
            assert isinstance(run(call), RetrievalFault)


def test_a_redirection_is_not_followed_because_it_would_lose_the_call() -> None:
    def elsewhere(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        return (302, b"") if method == "POST" else (200, b'{"answers":[{"result":{}}]}')

    with imitating(elsewhere) as url:
        assert isinstance(one(RemoteRetriever(url, about(), QUICK.machine), "ada"), RetrievalFault)


def test_a_server_that_does_not_answer_is_a_fault_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.retrieval.engines.remote.GRACE_S", 0.2)
    with socket.create_server((HOST, 0)) as silent:
        remote = RemoteRetriever(f"http://{HOST}:{silent.getsockname()[1]}", about(), QUICK.machine)
        begin = time.monotonic()
        fault = one(remote, "ada", -1.0)
        assert isinstance(fault, RetrievalFault)
        assert "no answer within 0.2 s" in fault.message
        assert time.monotonic() - begin < 2.0


def test_opening_where_nobody_answers_is_a_fault_of_the_infrastructure_with_a_clear_text() -> None:
    with pytest.raises(InfrastructureFault, match=r"no retriever answers at .*refused.*2 attempts"):
        opened(f"http://{HOST}:{free_port()}", QUICK)
    with (
        imitating(lambda *_: (502, b'{"error":"bad gateway"}')) as url,
        pytest.raises(InfrastructureFault, match="502 bad gateway"),
    ):
        opened(url)
    with imitating(lambda *_: (200, b'{"a":1}')) as url, pytest.raises(InfrastructureFault, match="does not describe"):
        opened(url)
    for odd in (f"http://{HOST}:notaport", "http:", "http://a b/"):
        with pytest.raises((ConfigError, InfrastructureFault)):
            opened(odd, QUICK)


@pytest.mark.parametrize("login", ["user:secret", "user:my@secret", ":secret"])
def test_an_address_with_a_password_is_refused_and_the_password_not_repeated(login: str) -> None:
    for spec in (f"http://{login}@{HOST}:1", f"https://{login}@{HOST}", f"http:{login}@{HOST}"):
        with pytest.raises(ConfigError) as caught:
            opened(spec, QUICK)
        assert "secret" not in str(caught.value)
        assert HOST in str(caught.value)


def test_opening_is_tried_again_while_a_server_starts() -> None:
    asked: list[str] = []

    def starting(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return (503, b"starting") if len(asked) == 1 else (200, msgspec.json.encode(about()))

    with imitating(starting) as url:
        assert opened(url).info.index_hash == "word-index"
    assert asked == ["/info", "/info"]


def test_other_ranking_settings_are_an_error_that_says_what_to_set() -> None:
    theirs = load_config(None, ["env.retrieval.mode=bm25", "env.retrieval.rerank.on=true"])
    with serving(WordRetriever(CORPUS), theirs) as url:
        with pytest.raises(ConfigError) as caught:
            opened(url)
        options = str(caught.value).partition("use them: ")[2].replace("--set ", "").split()
        assert options == ["env.retrieval.mode=bm25", "env.retrieval.rerank.on=true"]
        assert isinstance(opened(url, load_config(None, [*OPTIONS, *options])), RemoteRetriever)


@pytest.mark.parametrize(("status", "page"), [(404, b'{"detail":"Not Found"}'), (405, b""), (200, b"<html>")])
def test_a_server_that_tells_nothing_about_itself_is_taken_for_one_of_search_r1(status: int, page: bytes) -> None:
    def peer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        return (status, page) if (method, path) == ("GET", "/info") else (200 if path == "/retrieve" else 404, FOUND)

    with imitating(peer) as url:
        for spelling in (url, f"{url}/", f"{url}/retrieve"):
            retriever = opened(spelling, NO_GREP)
            assert isinstance(retriever, SearchR1Retriever)
            (found,) = run(retriever.search([SearchRequest("q", 1)]))
            assert [hit.chunk.chunk_id for hit in found.hits] == ["7"]


EVALUATION = ["eval", "world:60", "--json", "--out", "run", "--set", "machine.workers=2"]
EVALUATION += ["--set", "machine.attempts=2"]


@pytest.mark.service
def test_an_evaluation_whose_server_is_killed_has_faults_and_the_same_command_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    def harness1(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "harness1", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    index, port = tmp_path / "world", free_port()
    assert harness1("index", "world:60", "--out", str(index)).wait() == 0
    command = [*EVALUATION, "--index", f"http://{HOST}:{port}", "--samples", "10"]
    episodes = tmp_path / "run" / "episodes.jsonl"
    with process_serving(index, port) as (server, _):
        evaluation = harness1(*command)
        _wait_for(lambda: episodes.is_file() and episodes.stat().st_size > 0)
        server.kill()
        out, complaint = evaluation.communicate(timeout=120)
    assert "Traceback" not in complaint
    assert "Unclosed" not in complaint
    assert evaluation.returncode in (0, 3)
    before = list(read_episodes(tmp_path / "run"))
    whole = {episode.episode_id for episode in before if episode.status is Status.COMPLETED}
    assert whole
    if evaluation.returncode == 0:
        assert json.loads(out)["failures"]["infra_error"] == len(before) - len(whole) > 0
    assert all(episode.error for episode in before if episode.status is Status.INFRA_ERROR)
    with process_serving(index, port):
        again = harness1(*command)
        out, complaint = again.communicate(timeout=120)
    assert again.returncode == 0, complaint
    metrics = json.loads(out)
    assert (metrics["failures"]["infra_error"], metrics["missing"]) == (0, 0)
    finished = [episode for episode in read_episodes(tmp_path / "run") if episode.status is not Status.INFRA_ERROR]
    assert len(finished) == len({episode.key for episode in finished}) == 10 * metrics["tasks"] > len(whole)
    assert whole < {episode.episode_id for episode in finished}


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
