"""Answers Ctrl-C with a line if the work takes a while to end, and has SIGTERM end work as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 0.5
"""Seconds that an interrupted verb may take to end without an answer."""


@contextmanager
def answered_interrupts() -> Iterator[None]:
    """Print that Ctrl-C was heard, unless the work ends at once. Handlers of the signal stay as they are: the
    interpreter writes its number to a pipe, which a thread reads even while the main thread is in one long call."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()
    thread = threading.Thread(target=_listen, args=(reader, ended), daemon=True)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(former)
        os.close(writer)
        thread.join()
        os.close(reader)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end what is within as Ctrl-C does, also where Ctrl-C is ignored: in the background of a script. More
    of them change nothing."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _listen(reader: int, ended: threading.Event) -> None:
    """Say once that the work is stopping; return when the pipe is closed."""
    said = False
    while numbers := os.read(reader, 64):
        if signal.SIGINT in numbers and not said and not ended.wait(PATIENCE_S):
            from harness1.cli.printing import say

            say("stopping; what is at work is ended first")
            said = True
