"""Score the sessions of agents by a function that the user names."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from harness1.errors import UsageError
from harness1.plugins import is_own, load_own
from harness1.records import Record, RewardRecord, RewardTerm, Task
from harness1.rows.proxy_record import RecordedCall

DELIVERED = "delivered.txt"
"""The file in which an agent names the documents that it delivers, an id on each line."""
Cut = Literal["", "deadline", "output"]


class AgentSession(Record, kw_only=True):
    """One run of an agent, as it is scored: its task with the gold, its calls, and what it left behind."""

    name: str
    task: Task
    folder: Path
    """The agent's working folder, which is deleted once the session is scored."""
    calls: tuple[RecordedCall, ...] = ()
    """In the order in which they were answered, refused ones included."""
    output: str = ""
    """The end of what it wrote to standard output and standard error."""
    exit_code: int = 0
    """Negative: the signal that ended it."""
    cut: Cut = ""
    """Why it was ended from outside, if it was: it ran for too long, or wrote too much."""


Evaluate = Callable[[AgentSession], float | Mapping[str, float]]
"""Returns the reward of a session, or its terms by name, which are added up. It runs in a thread."""


def open_evaluation(name: str) -> Evaluate:
    """Return the function that `MODULE:FUNCTION` or `FILE.py:FUNCTION` names.

    Raises:
        UsageError: there is no such module, file or function.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UsageError(f"--evaluate {name}: give MODULE:FUNCTION or FILE.py:FUNCTION")
    if is_own(name):
        found = load_own(name)
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        try:
            found = getattr(importlib.import_module(place), function, None)
        except ImportError as error:
            raise UsageError(f"--evaluate {place} cannot be opened: {error}") from error
    if not callable(found):
        raise UsageError(f"--evaluate {name}: {place} has no function {function}")
    evaluate: Evaluate = found
    return evaluate


def reward_of(evaluate: Evaluate, session: AgentSession) -> RewardRecord:
    """Return the reward of a session.

    Raises:
        UsageError: the function returns something else than finite numbers.
        Exception: from the function; an InfrastructureFault leaves the session out of training.
    """
    given: Any = evaluate(session)
    terms = given if isinstance(given, Mapping) else {"reward": given}
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in terms.values()):
        raise UsageError(f"the evaluation of task {session.task.task_id} returned {given!r}: give finite numbers")
    return RewardRecord(
        float(sum(terms.values())), {name: RewardTerm(float(value), 1.0) for name, value in terms.items()}
    )


def delivered_f1(session: AgentSession) -> float:
    """Return F1 of the documents that the agent named in `delivered.txt`, against the gold; 0 if it named none."""
    path = session.folder / DELIVERED
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    named = {line.strip() for line in lines} - {""}
    gold = session.task.gold
    wanted = {doc_id for doc_id, grade in gold.relevant.items() if grade > 0} if gold is not None else set()
    right = len(named & wanted)
    return 2 * right / (len(named) + len(wanted)) if right else 0.0
