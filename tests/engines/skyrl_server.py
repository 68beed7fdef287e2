"""SkyRL's own server of the Tinker API, on a CPU. SkyRL 0.3.0 starts the engine behind it by `uv run`, in an
environment that uv makes; run as a module, this file starts both under the interpreter that runs the tests."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

STARTS_S = 300.0
ENDS_S = 30.0
RANK = 8
BACKEND = {
    "max_lora_adapters": 16,  # the first is the base model itself; a session keeps its own until it ends
    "max_lora_rank": RANK,
    "train_micro_batch_size": 1,  # each size of a batch would be compiled by itself
    "sample_max_num_sequences": 8,
}


def main() -> None:
    """Serve, with the settings of SkyRL's `EngineConfig`."""
    import uvicorn

    api, config = import_module("skyrl.tinker.api"), import_module("skyrl.tinker.config")

    def command(parent: list[str], settings: object) -> list[str]:
        return [sys.executable, "-m", "skyrl.tinker.engine", *config.config_to_argv(settings)]

    api._build_uv_run_cmd_engine = command
    parser = argparse.ArgumentParser()
    config.add_model(parser, config.EngineConfig)
    parser.add_argument("--port", type=int)
    asked = vars(parser.parse_args())
    port = asked.pop("port")
    api.app.state.engine_config = config.EngineConfig.model_validate(asked)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


@contextmanager
def serving(base: Path, place: Path) -> Iterator[str]:
    """The URL of a server of the model in a folder, in processes of its own; its log and states lie in `place`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "base-model": base,
        "port": port,
        "backend-config": json.dumps(BACKEND),
        "checkpoints-base": place / "states",
        "database-url": f"sqlite:///{place / 'requests.db'}",
        "session-timeout-sec": -1,  # a client that compiles beside it may miss its heartbeat
    }
    command = [sys.executable, "-m", "tests.engines.skyrl_server"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with (place / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}/api/v1/healthz")
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTS_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(1)
    raise AssertionError("the server did not start")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its engine, which share a process group."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(ENDS_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    main()
