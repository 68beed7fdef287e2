"""Ctrl-C is answered at once where the work at hand takes a while to end, and only there."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness1.cli.rl import interrupt_by_sigterm

TOLD = "harness1: stopping; what is at work is ended first\n"
CODE = """
import asyncio, time
from harness1.cli.main import answer_interrupts

async def work():
    try:
        await asyncio.sleep(60)
    finally:
        time.sleep({tail})

with answer_interrupts():
    print("ready", flush=True)
    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        print("ended")
"""

ONE_LONG_CALL = """
import hashlib
from harness1.cli.main import answer_interrupts

with answer_interrupts():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)
"""
"""A call without a Python instruction in it, like a step of a training."""


@pytest.mark.parametrize(("tail", "told"), [(1.2, TOLD), (0.0, "")])
def test_an_interrupt_is_answered_only_if_the_work_goes_on(tail: float, told: str) -> None:
    with interrupted(CODE.format(tail=tail)) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "ended\n", told)


def test_an_interrupt_is_answered_while_one_long_call_goes_on() -> None:
    with interrupted(ONE_LONG_CALL) as process:
        assert process.stderr.readline() == TOLD
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(("handler", "told"), [("default_int_handler", TOLD), ("SIG_IGN", "")])
def test_sigterm_ends_work_as_an_interrupt_does_also_where_interrupts_are_ignored(handler: str, told: str) -> None:
    code = f"from harness1.cli.rl import interrupt_by_sigterm\n{CODE}"
    code = code.replace("with answer_interrupts()", "with answer_interrupts(), interrupt_by_sigterm()")
    with interrupted(code.format(tail=1.2), signal.SIGTERM, handler) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "ended\n", told)


def test_sigterm_is_as_before_once_the_work_has_ended() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupt_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@contextmanager
def interrupted(
    code: str, sent: signal.Signals = signal.SIGINT, handler: str = "default_int_handler"
) -> Iterator[subprocess.Popen[str]]:
    """A process that is interrupted while it works.

    It sets its own handler: with a `preexec_fn`, what other tests loaded (gRPC) would print to its stderr as it forks.
    """
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.{handler})\n{code}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        os.kill(process.pid, sent)
        yield process
