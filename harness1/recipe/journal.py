"""The journal of a recipe's folder: which stages are done, from what, and what their gates found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import msgspec

from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.recipe.gates import Finding
from harness1.records import Record
from harness1.runs.files import lock, write_json, writing

JOURNAL, LOCK, LOGS = "recipe.json", ".lock", "logs"
TRIES, PAUSE_S = 5, 0.1


class StageRecord(Record, kw_only=True):
    """What is known of one stage."""

    words: tuple[str, ...]
    """Its command, without `harness1`."""
    needs: dict[str, str]
    """The hash of everything that it used, by the name of stage or input."""
    status: Literal["running", "passed", "failed"]
    artifact: str = ""
    """The hash of what it made."""
    gates: dict[str, float | bool] = {}
    """The recipe's own bounds."""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    """The time that its command took, over all attempts."""
    exit: int = 0
    """The exit code of its command."""
    metrics: dict[str, float] = {}
    began: float = 0.0
    """When its command was last started, in seconds since 1970."""

    def status_now(self, at_work: bool) -> str:
        """Return the status; `stopped` where no process is at work on a stage that began and did not end."""
        return "stopped" if self.status == "running" and not at_work else self.status


class Planned(Record):
    """What a recipe says of a stage before it begins."""

    says: str = ""
    takes: float = 0.0
    """The seconds that it took on two quiet cores; 0: not known."""


class Journal(Record, kw_only=True):
    """The content of `recipe.json`."""

    title: str
    recipe: str
    """The hash of the recipe at the last run."""
    inputs: dict[str, str]
    """The hash of each input at the start; of one that is no file, its name."""
    stages: dict[str, StageRecord] = {}
    plan: dict[str, Planned] = {}
    """Every stage of the last run, in order."""

    def expected(self) -> dict[str, float]:
        """Return the seconds that each stage of the plan takes that has not passed, at the pace of those that have;
        0: not known."""
        passed = {name: record for name, record in self.stages.items() if record.status == "passed"}
        known = [name for name in passed if name in self.plan and self.plan[name].takes]
        planned = sum(self.plan[name].takes for name in known)
        pace = sum(passed[name].seconds for name in known) / planned if planned else 1.0
        return {name: stage.takes * pace for name, stage in self.plan.items() if name not in passed}

    def left(self, now: float) -> float | None:
        """Return the seconds that are left, or None if nothing is known of the stages to come.

        Args:
            now: the time, in seconds since 1970.
        """
        rest = self.expected()
        if rest and not any(rest.values()):
            return None
        for name, record in self.stages.items():
            if record.status == "running" and name in rest:
                rest[name] = max(0.0, rest[name] - record.seconds - (now - record.began))
        return sum(rest.values())

    def with_stage(self, name: str, record: StageRecord) -> Journal:
        return msgspec.structs.replace(self, stages={**self.stages, name: record})

    def without(self, names: Sequence[str]) -> Journal:
        kept = {name: record for name, record in self.stages.items() if name not in names}
        return msgspec.structs.replace(self, stages=kept)


def read_journal(work: Path) -> Journal | None:
    """Return the journal of a folder, or None if it has none; raise SchemaError if it is damaged."""
    path = work / JOURNAL
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Journal)
    except MALFORMED as error:
        raise SchemaError(f"{path} is not the journal of a recipe: {error}") from error


def write_journal(work: Path, journal: Journal) -> None:
    """Replace the journal of a folder in one step."""
    write_json(work / JOURNAL, journal)


def is_at_work(work: Path) -> bool:
    """Return True if a process is running the recipe of a folder: one that was killed has left its stage `running`."""
    try:
        with (work / LOCK).open() as file:
            lock(file, "")
    except FileNotFoundError:
        return False
    except UsageError:
        return True
    return False


@contextmanager
def held(work: Path, mark: str = JOURNAL) -> Iterator[None]:
    """Hold the folder of a recipe against other processes.

    Args:
        mark: the file that a folder of this kind has.

    Raises:
        UsageError: another process holds it, it cannot be written, or it holds something else.
    """
    with writing(work):
        if work.exists() and not (work / mark).exists() and any(each.name != LOCK for each in work.iterdir()):
            raise UsageError(f"{work} is not empty and holds no recipe: choose another --out")
        work.mkdir(parents=True, exist_ok=True)
        with (work / LOCK).open("w") as file:
            _lock(file, work)
            yield


def _lock(file: IO[str], work: Path) -> None:
    """Lock the folder; wait a moment for one that only looks whether somebody is at work."""
    for _ in range(TRIES - 1):
        try:
            return lock(file, "")
        except UsageError:
            time.sleep(PAUSE_S)
    return lock(file, f"{work} is at work in another process")
