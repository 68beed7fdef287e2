"""Recipes: the chain from documents to an evaluated policy, with gates between the stages, and trials of settings."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl(2)."""


def run_on_leash() -> None:
    """Run `harness1 VERB...` in this process, which ends when its parent does, however the parent ends; the arguments
    are PARENT PROCESSES VERB... Several processes are started by torchrun, which ends them."""
    processes = sys.argv[2]
    _follow(int(sys.argv[1]))
    if processes == "1":
        sys.argv[:3] = ["harness1"]
        runpy.run_module("harness1", run_name="__main__", alter_sys=False)
    else:
        sys.argv[:3] = ["torchrun", "--nproc-per-node", processes, "-m", "harness1"]
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=False)


def exec_on_leash() -> None:
    """Become the program of the arguments PARENT PROGRAM..., which ends when the parent does, as `run_on_leash`."""
    _follow(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


def _follow(parent: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:  # elsewhere the process goes on to its end
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be followed
        os.kill(os.getpid(), signal.SIGKILL)
