"""The session of an agent: its reward by a function that the user names, and its record as an episode."""

from __future__ import annotations

import importlib
import math
import os
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from harness1.episodes.jobs import EpisodeJob
from harness1.errors import UsageError
from harness1.plain import digest, file_digest
from harness1.plugins import import_added, is_own, load_own
from harness1.records import (
    Episode,
    Hashes,
    ModelCall,
    Record,
    RewardRecord,
    RewardTerm,
    Sampling,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.reward import call_own, number_of
from harness1.rows.calls import RecordedCall

DELIVERED = "delivered.txt"  # in which an agent names the documents that it delivers, an id on each line
SAID = ToolCall("message")  # the action of a call without a tool call: its text is the answer
BROKEN = frozenset((500, 502, 503, 504))  # statuses of calls that the infrastructure failed
MOST_READ = 1 << 20  # bytes of a file that an agent left
Cut = Literal["", "deadline", "output", "disk"]


class AgentSession(Record, kw_only=True):
    """One run of an agent, as it is scored: its task with the gold, its calls, and what it left behind."""

    name: str
    task: Task
    folder: Path  # the agent's working folder, which is deleted once the session is scored
    calls: tuple[RecordedCall, ...] = ()  # in the order in which they were answered, refused ones included
    output: str = ""  # the end of what it wrote to standard output and standard error
    exit_code: int = 0  # negative: the signal that ended it
    cut: Cut = ""  # why it was ended from outside, if it was: it ran for too long, or wrote too much

    def read(self, name: str, most: int = MOST_READ) -> str:
        """Return the text of a file in the agent's folder; empty if there is none, or if it is no plain file of at most
        `most` bytes, or lies elsewhere: an agent may leave pipes, links to files of others, and sparse terabytes."""
        root = os.path.realpath(self.folder)
        with suppress(OSError, ValueError):
            place = os.path.realpath(f"{root}/{name}")  # which ends in circles of links, too
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size <= most
                if plain and place.startswith(f"{root}/"):
                    return file.read(most).decode(errors="replace")
        return ""

    def fault(self) -> str:
        """Return what broke the session; empty if nothing. It is broken without a single answered call, too: then it
        says nothing about the policy."""
        if failed := next((call for call in self.calls if call.status in BROKEN), None):
            return f"a call failed: {failed.error}"
        if any(call.as_call() for call in self.calls):
            return ""
        refused = next((call.error or call.untrainable for call in self.calls if call.error or call.untrainable), None)
        last = self.output.strip().rpartition("\n")[2][-200:] or "no output"
        return f"the agent made no call that can be trained on (exit {self.exit_code}): {refused or last}"


Evaluate = Callable[[AgentSession], float | Mapping[str, float]]
"""The reward of a session, or terms by name, which are added up."""


def open_evaluation(name: str) -> Evaluate:
    """Return the function that `MODULE:FUNCTION` or `FILE.py:FUNCTION` names; raise UsageError if there is none."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UsageError(f"--evaluate {name}: give MODULE:FUNCTION or FILE.py:FUNCTION")
    if is_own(name):
        found = load_own(name)
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        found = getattr(import_added(partial(importlib.import_module, place), f"--evaluate {place}"), function, None)
    if not callable(found):
        raise UsageError(f"--evaluate {name}: {place} has no function {function}")
    evaluate: Evaluate = found
    return evaluate


def digest_of(name: str) -> str:
    """Return the sha256 of the file of an evaluation that was opened; empty if it is in none."""
    place = name.rpartition(":")[0]
    file = place if is_own(name) else getattr(sys.modules[place], "__file__", None)
    return file_digest(Path(file).expanduser()) if file else ""


def reward_of(evaluate: Evaluate, session: AgentSession) -> RewardRecord:
    """Return the reward of a session; raise UsageError if the function fails or returns no finite numbers. Its own
    InfrastructureFault is raised as it is, and leaves the session out of training."""
    given: Any = call_own("evaluate", evaluate, session)
    terms = given if isinstance(given, Mapping) else {"reward": given}
    if wrong := [name for name in terms if not isinstance(name, str)]:
        raise UsageError(f"the evaluation named a term {wrong[0]!r}: names of terms are texts")
    values = {name: number_of(name, value, session.task) for name, value in terms.items()}
    return RewardRecord(math.fsum(values.values()), {name: RewardTerm(value, 1.0) for name, value in values.items()})


def delivered_f1(session: AgentSession) -> float:
    """Return F1 of the documents that the agent named in `delivered.txt`, against the gold; 0 if it named none."""
    named = {line.strip() for line in session.read(DELIVERED).splitlines()} - {""}
    gold = session.task.gold
    wanted = {doc_id for doc_id, grade in gold.relevant.items() if grade > 0} if gold is not None else set()
    right = len(named & wanted)
    return 2 * right / (len(named) + len(wanted)) if right else 0.0


def episode_of(job: EpisodeJob, session: AgentSession, reward: RewardRecord, hashes: Hashes) -> Episode:
    """Return the episode of a session that is not broken: each answered call is a turn, so that rows are made as of any
    other. A prompt that continues an earlier one and its output stores what is new alone."""
    answered = [call for call in session.calls if call.as_call() is not None]
    segments: dict[str, tuple[int, ...]] = {}
    turns: list[Turn] = []
    told: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((), ())]  # prompts with their outputs, and their segments
    for place, call in enumerate(answered):
        ids, keys = next(each for each in reversed(told) if call.prompt_ids[: len(each[0])] == each[0])
        keys = (*keys, f"prompt/{call.call_id}")
        told.append((call.prompt_ids + call.output_ids, (*keys, f"call/{call.call_id}")))
        segments[keys[-1]] = call.prompt_ids[len(ids) :]
        same = ("call_id", "attempt", "output_ids", "finish_reason", "t_start", "t_end")
        sampled = ModelCall(
            **{name: getattr(call, name) for name in same},
            prompt=keys,
            output_logprobs=call.output_logprobs or (),
            sampling=call.sampling or Sampling(),
            policy_version_start=call.version_start,
            policy_version_end=call.version_end,
        )
        action, *ignored = call.actions or (SAID,)
        size = len(call.prompt_ids)
        turns.append(Turn(place + 1, calls=(sampled,), action=action, ignored=tuple(ignored), prompt_tokens=size))
    versions = [version for call in answered for version in (call.version_start, call.version_end)]
    return Episode(
        episode_id=digest([job.task.public(), job.sample_idx, job.seed, hashes, session.name])[:16],
        task=job.task.public(),
        sample_idx=job.sample_idx,
        group_id=job.group_id,
        seed=job.seed,
        turns=tuple(turns),
        stop_reason=StopReason.TURN_LIMIT if session.cut else StopReason.END_SEARCH,
        status=Status.COMPLETED,
        reward=reward,
        hashes=hashes,
        policy_versions=(min(versions), max(versions)),
        segments=segments,
    )
