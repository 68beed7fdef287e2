"""A live page: what it is told of runs under way, and who may ask."""

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgspec
import pytest

from harness1.records import Episode
from harness1.runs.journal import EPISODES, read_appended, read_episodes
from harness1.serve.server import answering
from harness1.serve.view import HOST, LIMITS, view_app
from harness1.viewer.live import Watched
from tests.cli.commands import command_in_process
from tests.serving import in_thread
from tests.support import hearing
from tests.viewer.making import inflate, write_episodes, write_training, write_whole_run
from tests.viewer.recordings import save_student, write_recording


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three tasks."""
    return write_whole_run(tmp_path_factory.mktemp("live"), 3)


def begin(folder: Path, whole: Path) -> list[Episode]:
    """The card of a run without its episodes, which are returned."""
    folder.mkdir()
    shutil.copy(whole / "stage.json", folder)
    (folder / EPISODES).touch()
    return list(read_episodes(whole))


def watch(folder: Path, whole: Path, count: int) -> tuple[list[Episode], Watched, dict[str, Any]]:
    """A watched run with its first episodes; all episodes, and what a page is told first."""
    episodes = begin(folder, whole)
    write_episodes(folder, episodes[:count])
    watched = Watched([folder])
    return episodes, watched, after(watched)


def after(watched: Watched, before: dict[str, Any] | None = None) -> dict[str, Any]:
    return watched.news(before["life"], before["next"]) if before else watched.news("", 0)


def names(found: dict[str, Any]) -> list[tuple[int, str]]:
    return [(at, row.task) for at, row in found["rows"]]


def test_a_page_is_told_of_each_new_episode_once_and_only_what_was_appended_is_read(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(side_effect=read_appended)
    monkeypatch.setattr("harness1.viewer.live.read_appended", read)
    watched = Watched([tmp_path / "run"])
    first = after(watched)
    assert (first["waiting"], first["rows"], first["runs"]) == ([str(tmp_path / "run")], [], [])
    one, two, three = begin(tmp_path / "run", whole)
    second = after(watched, first)
    assert (second["waiting"], second["rows"], len(second["runs"])) == ([], [], 1)
    write_episodes(tmp_path / "run", [one])
    third = after(watched, second)
    assert names(third) == [(0, "task-0")]
    assert third["rows"][0][1].recall == pytest.approx(2 / 3, abs=1e-3)
    size = (tmp_path / "run" / EPISODES).stat().st_size
    write_episodes(tmp_path / "run", [two, three])
    fourth = after(watched, third)
    assert names(fourth) == [(1, "task-1"), (2, "task-2")]
    assert [call.args[1] for call in read.call_args_list] == [0, 0, size]
    assert names(after(watched, fourth)) == []
    assert names(after(watched)) == [(0, "task-0"), (1, "task-1"), (2, "task-2")], "another page gets all"


def test_a_line_that_is_being_written_is_left_for_later_and_an_edited_one_is_told(tmp_path: Path, whole: Path) -> None:
    one, two, _ = begin(tmp_path / "run", whole)
    write_episodes(tmp_path / "run", [one, two])
    path = tmp_path / "run" / EPISODES
    lines = path.read_bytes()
    path.write_bytes(lines[:-40])
    watched = Watched([tmp_path / "run"])
    found = after(watched)
    assert names(found) == [(0, "task-0")]
    path.write_bytes(lines)
    assert names(after(watched, found)) == [(1, "task-1")]
    assert found["problems"] == []
    first, second = lines.splitlines(keepends=True)
    path.write_bytes(first + second.replace(b"Lovelace", b"Loveless", 1))
    edited = after(Watched([tmp_path / "run"]))
    assert (names(edited), "was changed" in edited["problems"][0]) == ([(0, "task-0")], True)


def test_an_episode_played_again_takes_its_place_and_a_run_begun_again_is_another_life(
    tmp_path: Path, whole: Path
) -> None:
    (one, two, _), watched, found = watch(tmp_path / "run", whole, 2)
    write_episodes(tmp_path / "run", [one])
    found = after(watched, found)
    assert names(found) == [(0, "task-0")]
    (tmp_path / "run" / EPISODES).unlink()
    write_episodes(tmp_path / "run", [two])
    again = after(watched, found)
    assert again["life"] != found["life"]
    assert names(again) == [(0, "task-1")]


def test_the_data_of_an_episode_is_made_on_request_and_brings_what_it_needs(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, two, _), watched, _ = watch(tmp_path / "run", whole, 2)
    made: list[int] = []
    original = watched._runs[0].episode
    monkeypatch.setattr(watched._runs[0], "episode", lambda start: made.append(start) or original(start))
    text = watched.data("e1")
    data, numbers, own = map(inflate, text.split(","))
    assert data["query"] == two.task.query
    assert numbers == []
    assert own["passages"]
    assert watched.data("e1") == text
    assert len(made) == 1
    shared = watched.data("r0")
    assert inflate(shared)["specs"]
    assert [watched.data(name) for name in ("e2", "e", "r1", "x0", "e1/..", "e²", "t0", "s0", "e" + "9" * 5000)] == [
        None
    ] * 9


def test_curves_of_trainings_and_sessions_of_proxies_grow(tmp_path: Path) -> None:
    training = write_training(tmp_path / "train", steps=3)
    agent = write_recording(tmp_path / "agent", tmp_path / "student", save_student(tmp_path / "student"))
    watched = Watched([training, agent, training])
    found = after(watched)
    assert [row["name"] for name in ("trainings", "sessions") for row in found[name]] == ["train", "talk", "chat"]
    assert {"t0", "s0", "s1"} <= set(found["changed"])
    assert after(watched, found)["changed"] == []
    with (training / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "reward": 9.0}\n')
    assert after(watched, found)["changed"] == ["t0"]
    curve = watched.data("t0")
    assert inflate(curve)["curves"]["reward"][1][-1] == 9.0
    session = watched.data("s0")
    assert inflate(session)["name"] == "talk"


def test_the_episodes_of_a_training_are_followed_with_it(tmp_path: Path, whole: Path) -> None:
    training = write_training(tmp_path / "train", steps=3)
    msg = {"verb": "rl train", "inputs": {}}
    (training / "stage.json").write_bytes(msgspec.json.encode(msg))
    one, *_ = begin(training / "episodes", whole)
    write_episodes(training / "episodes", [one])
    watched = Watched([training])
    assert names(after(watched, after(watched))) == [(0, "task-0")]


def test_a_folder_of_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stage.json").write_text('{"verb": "sft build", "inputs": {}}')
    ended = command_in_process(monkeypatch, capsys)("view", "--serve", str(tmp_path))
    assert (ended.code, "is not a run folder" in ended.err) == (2, True)


class Listening(NamedTuple):
    address: str
    server_port: int


@contextmanager
def listening(folder: Path) -> Iterator[Listening]:
    app = view_app(Watched([folder]))
    with in_thread(lambda: answering(app, LIMITS, HOST, 0)) as url:
        yield Listening(f"{url}/", int(url.rpartition(":")[2]))


def ask(server: Listening, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    named = {"Host": f"127.0.0.1:{server.server_port}", **{name.replace("_", "-"): headers[name] for name in headers}}
    for name, value in named.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, {name.title(): value for name, value in answer.getheaders()}, answer.read()


@pytest.mark.service
def test_only_pages_of_this_server_are_answered(whole: Path) -> None:
    with listening(whole) as server:
        port = server.server_port
        status, headers, body = ask(server)
        assert status == 200
        assert b"default-src 'none'" in body
        assert b"connect-src 'self'" in body
        for host in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST"):
            assert ask(server, Host=f"{host}:{port}")[0] == 200
        others = ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}")
        for host in (*others, "127.0.0.1", f"localhost.:{port}", ""):
            assert ask(server, "/news", Host=host)[0] in (400, 421)
        assert ask(server, "/news", Origin=f"http://localhost:{port}")[0] == 200
        for origin in ("http://evil.example", "null", "http://localhost", f"https://localhost:{port}"):
            assert ask(server, "/news", Origin=origin)[0] == 403
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, "/news", method)[0] == 405
        assert ask(server, "/news", "HEAD")[2] == b""
        for path in ("/stage.json", "/data/../stage.json", "/data/e99", "/data/"):
            status, headers, _ = ask(server, path)
            assert status == 404
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert ask(server, "/news?life=x&next=-1")[0] == ask(server, f"/news?next={'9' * 30}")[0] == 200


@pytest.mark.service
def test_the_server_says_where_it_is_and_ends_with_at_most_a_line(whole: Path) -> None:
    command = [sys.executable, "-m", "harness1", "view", "--serve", str(whole), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, preexec_fn=hearing())
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        connection.request("GET", "/news")
        assert len(msgspec.json.decode(connection.getresponse().read())["rows"]) == 3
        crowd = [socket.create_connection((HOST, int(found[1])), timeout=10) for _ in range(40)]
        crowd[0].sendall(f"GET /news HTTP/1.1\r\nHost: 127.0.0.1:{found[1]}\r\n\r\n".encode() * 300)
        crowd[0].recv(100)
        crowd[0].close()  # while a later one is answered
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 130
        assert len(said.splitlines()) <= 1
        assert "Traceback" not in said
        for each in crowd:
            each.close()
    finally:
        process.kill()
        process.communicate()
