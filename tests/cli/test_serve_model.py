"""`harness1 serve model`: llama.cpp's server as a child that ends with us, or the model in this process."""

import json
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Command
from tests.cli.test_model_commands import save_model
from tests.support import command_process

STAND_IN = """#!{python}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
began = time.monotonic()
print("loading", given["--model"], flush=True)
if "broken" in given["--model"]:
    sys.exit("the model is broken")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.monotonic() - began > 0.5
        self.send_response(200 if ready or self.path != "/health" else 503)
        self.end_headers()
        self.wfile.write(json.dumps(dict(given, first=sys.argv[1], pid=os.getpid())).encode())

    def log_message(self, *_):
        pass

HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""
"""In place of llama.cpp's server: it tells what it was started with."""


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, as `models get` leaves it, and the stand-in on the path."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(STAND_IN.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "tiny-0.5b"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "model.gguf").touch()
    return folder


def asked(line: str, path: str = "/v1/models", body: object = None) -> Any:
    address = re.search(r"http://[\d.:]+", line)
    assert address, line
    sent = json.dumps(body).encode() if body else None
    request = urllib.request.Request(address[0] + path, sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 0), ("SIGINT", 130), ("SIGKILL", -9)])
def test_the_server_is_given_what_policies_need_and_ends_with_us(llama: Path, number: str, code: int) -> None:
    with command_process("model", str(llama), "--slots", "3", "--set", "machine.threads=1") as (process, line):
        given = asked(line)
        where = line.removeprefix("tiny-0.5b at ").removesuffix(" (llama.cpp, 3 slots of 4,096 tokens). Its policy:\n")
        assert process.stdout.readline() == f"--policy openai:tiny-0.5b@{where}/v1 --config local\n"
        assert (given["first"], given["--alias"]) == ("--jinja", "tiny-0.5b")
        assert given["--model"] == str(llama / "model.gguf")
        assert (given["--ctx-size"], given["--parallel"], given["--threads"]) == (str(3 * 4096), "3", "1")
        process.send_signal(getattr(signal, number))
        assert process.wait(20) == code
        assert ends(given["pid"])


def test_a_folder_is_called_by_its_own_name_and_as_a_shell_reads_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama.rename(llama.with_name("my model")))
    with command_process("model", ".", "--set", "env.context_window=3000") as (process, line):
        given = asked(line)
        assert (given["--alias"], given["--ctx-size"]) == ("my model", str(4 * 3000)), "a smaller window is kept"
        assert process.stdout.readline().startswith("--policy 'openai:my model@http://127.0.0.1:")


def test_a_server_that_ends_by_itself_is_a_fault(llama: Path) -> None:
    with command_process("model", str(llama)) as (process, line):
        os.kill(asked(line)["pid"], signal.SIGKILL)
        assert process.wait(20) == 3
        assert process.stderr.read() == "harness1: the model's server ended: signal SIGKILL\n"


def test_a_server_that_does_not_start_shows_its_log(llama: Path, harness1: Command) -> None:
    broken = llama.rename(llama.with_name("broken"))
    code, _, told = harness1("serve", "model", str(broken))
    assert code == 3
    assert told.splitlines()[-2:] == [
        "harness1: the model is broken",
        f"harness1: {llama.parent}/bin/llama-server did not start: exit status 1, with the log above",
    ]


def test_a_port_in_use_is_refused_in_one_line(llama: Path, harness1: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = harness1("serve", "model", str(llama), "--port", str(port))
    assert ended == (2, "", f"harness1: cannot listen on 127.0.0.1:{port}: Address already in use\n")


@pytest.mark.slow
def test_without_llama_cpp_the_model_runs_in_this_process(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", seed=0)
    call = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    small = ("--set", "env.context_window=4000", "--set", "machine.device=cpu")
    options = "--config local --set policy.constrained=false"
    with command_process("model", str(tmp_path / "tiny"), *small) as (process, line):
        address = line.removeprefix("tiny at ").removesuffix(
            " (in this process, 4 slots of 4,000 tokens). Its policy:\n"
        )
        assert process.stdout.readline() == f"--policy openai:tiny@{address}/v1 {options}\n"
        assert asked(line)["data"][0]["id"] == "tiny"
        assert asked(line, "/v1/chat/completions", call)["usage"]["completion_tokens"] == 4
        process.terminate()
        assert process.wait(20) == 0
        assert process.stderr.read().endswith(": serving in this process\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.gguf", "nothing.gguf is no GGUF file: [Errno 2] No such file or directory: 'nothing.gguf'"),
        ("a" * 300, f"no model '{'a' * 300}': [Errno 36] File name too long: '{'a' * 300}/adapter_config.json'"),
        (
            "qwen2.5-coder-0.5b",
            "the model qwen2.5-coder-0.5b was not fetched; run: harness1 models get qwen2.5-coder-0.5b",
        ),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(
    name: str, said: str, harness1: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert harness1("serve", "model", name) == (2, "", f"harness1: {said}\n")
