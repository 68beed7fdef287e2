"""Engines and servers of vLLM that tests start, and what they are asked for."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from harness1.models.backend import Backend, SampledOutput
from harness1.records import Sampling
from tests.support import run

needs_vllm = [
    pytest.mark.service,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"),
]
STARTS_S = 300.0
WINDOW = 512
STOP = 2
"""<|im_end|>, which ends an output of SmolLM2."""
PROMPT = (1, 504, 3575, 282, 4649, 314)
"""`<|im_start|>The capital of France is`"""


@contextmanager
def serving(
    folder: Path, options: Mapping[str, str], flags: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of a vLLM server in a process of its own, with variables of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {
        "model": str(folder),
        "served-model-name": "smol",
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": str(WINDOW),
        "kv-cache-memory-bytes": str(1 << 28),
        "logprobs-mode": "processed_logprobs",
    }
    # The CPU build has no metadata under the name that the command `vllm` looks for.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *flags]
    command += [part for name, value in {**every, **options}.items() for part in (f"--{name}", value)]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | dict(settings or {})
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTS_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(1)
    raise AssertionError("the server did not start")


def prompt_of(seed: int) -> tuple[int, ...]:
    return PROMPT[: 3 + seed % 4]


def sampled_together(backend: Backend, samplings: Sequence[Sampling]) -> list[SampledOutput]:
    async def work() -> list[SampledOutput]:
        calls = [backend.generate(prompt_of(sampling.seed or 0), sampling) for sampling in samplings]
        return await asyncio.gather(*calls)

    return run(work())
