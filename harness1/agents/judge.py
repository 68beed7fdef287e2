"""The judge: the user's evaluation in a process of its own, with a deadline, which alone is given the gold."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec

from harness1.agents.evaluation import AgentSession, digest_of, open_evaluation, reward_of
from harness1.data.apart import start_apart
from harness1.errors import HarnessError, InfrastructureFault, UsageError
from harness1.plugins import failure
from harness1.records import RewardRecord

MOST_REPLY, MOST_REASON = 1 << 20, 2000
ENDING_S = 5.0  # that a process may take to end once it has closed its line
REPLY = tuple[str, RewardRecord | None]


class Worker(NamedTuple):
    """A process that evaluates, one session at a time."""

    process: subprocess.Popen[bytes]
    line: Connection

    def kill(self) -> None:
        """Kill it, with what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Judge:
    """Rates sessions by the function that `MODULE:FUNCTION` or `FILE.py:FUNCTION` names, each within some seconds.
    Its processes stay as long as they answer. Raises UsageError: as `open_evaluation`."""

    def __init__(self, evaluation: str, seconds: float) -> None:
        open_evaluation(evaluation)
        self._evaluation, self._digest, self._seconds = evaluation, digest_of(evaluation), seconds
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False

    def rate(self, session: AgentSession) -> RewardRecord:
        """Return the reward of a session; raise InfrastructureFault if the evaluation cannot be started, fails, takes
        too long, returns no finite numbers, or is in a file that was edited since this judge was made."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._begin()
        try:
            worker.line.send((self._evaluation, self._digest, session))
            if not worker.line.poll(self._seconds):
                raise InfrastructureFault(f"it took more than {self._seconds:g} s")
            error, reward = msgspec.msgpack.decode(worker.line.recv_bytes(MOST_REPLY), type=REPLY)
        except (OSError, EOFError, msgspec.MsgspecError) as fault:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(0.0 if isinstance(fault, msgspec.MsgspecError) else ENDING_S)
            code = worker.process.poll()  # its own, not that of being killed below
            self._end(worker)
            why = f"its reply cannot be read: {fault!r}" if code is None else f"its process ended ({code})"
            raise InfrastructureFault(why) from fault
        except RecursionError as deep:
            self._end(worker)
            raise InfrastructureFault("what the agent sent is nested too deeply to be judged") from deep
        except BaseException:
            self._end(worker)
            raise
        self._idle.append(worker)
        if reward is None:
            raise InfrastructureFault(error)
        rated: RewardRecord = reward
        return rated

    def close(self) -> None:
        """End all processes, those at work too, whose threads then close their lines."""
        self._closed = True
        for worker in [*self._all]:
            worker.kill()
        while self._idle:
            self._end(self._idle.pop())

    def _begin(self) -> Worker:
        try:
            worker = Worker(*start_apart(__name__, stdout=2))  # standard output is the result of the command
        except OSError as error:
            raise InfrastructureFault(f"its process cannot be started: {error.strerror or error}") from error
        self._all.add(worker)
        if self._closed:
            self._end(worker)
            raise InfrastructureFault("the training has ended")
        return worker

    def _end(self, worker: Worker) -> None:
        worker.kill()
        worker.process.wait()
        worker.line.close()
        self._all.discard(worker)


def serve(descriptor: int) -> None:
    """Rate sessions until the connection is closed."""
    with Connection(descriptor) as line, suppress(EOFError):
        while True:
            line.send_bytes(reply_to(*line.recv()))


def reply_to(name: str, digest: str, session: AgentSession) -> bytes:
    """Return the reward of a session, or why there is none, as it is sent."""
    try:
        evaluate = open_evaluation(name)
        if digest_of(name) != digest:  # half a training by one reward, and half by another, is none
            raise UsageError(f"{name} was edited since the training began: put it back, or begin again")
        sent = msgspec.msgpack.encode(("", reward_of(evaluate, session)))
        if len(sent) <= MOST_REPLY:
            return sent
        reason = f"its terms take more than {MOST_REPLY} bytes"
    except HarnessError as fault:
        reason = str(fault)
    except Exception as error:  # noqa: BLE001  names that cannot be sent, errors that fail to say what they are
        reason = failure(error)
    return msgspec.msgpack.encode((reason[:MOST_REASON].encode(errors="replace").decode(), None))
