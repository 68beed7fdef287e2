"""Runs `harness1` in a process of its own that ends when its parent does, however the parent ends.

    python -m harness1.recipe.leash PARENT PROCESSES VERB...

Of several processes, which torchrun starts, it ends torchrun, which ends them.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl(2)."""


def follow(parent: int) -> None:
    """Let the system kill this process when its parent dies; where it cannot, the process goes on to its end."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be followed
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    follow(int(sys.argv.pop(1)))
    processes = sys.argv.pop(1)
    if processes == "1":
        sys.argv[0] = "harness1"
        runpy.run_module("harness1", run_name="__main__", alter_sys=False)
    else:
        sys.argv[:1] = ["torchrun", "--nproc-per-node", processes, "-m", "harness1"]
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=False)
