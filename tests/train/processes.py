"""Processes of a group, for tests of what they do together."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

LIMIT_S = 120
"""Seconds after which processes count as hanging."""
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.multiprocessing"),
    *("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"),
    *("harness1.engines.engine", "tests.train.test_micro_batch"),
)
"""Imported once, in the process from which all others are forked."""


def codes_of(target: Callable[..., None], *arguments: object) -> list[int | None]:
    """Call `target(rank, *arguments)` in two processes as a launcher would; return their exit codes, and None for one
    that hangs."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    context.set_forkserver_preload(list(PRELOADED))
    members = [context.Process(target=_run, args=(rank, port, target, arguments)) for rank in (0, 1)]
    for each in members:
        each.start()
    ends = time.monotonic() + LIMIT_S
    for each in members:
        each.join(max(0.0, ends - time.monotonic()))
    codes = [each.exitcode for each in members]
    for each in members:
        each.kill()
    return codes


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        port: int = opened.getsockname()[1]
        return port


def _run(rank: int, port: int, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.setpgid(0, 0)  # interrupts of this process must not reach the tests
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        sys.stderr = nowhere
        target(rank, *arguments)
