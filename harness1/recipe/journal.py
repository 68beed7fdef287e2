"""The journal of a recipe's folder: which stages are done, from what, and what their gates found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.recipe.gates import Finding
from harness1.records import Record
from harness1.runs.files import lock, write_json, writing

JOURNAL, LOCK, LOGS = "recipe.json", ".lock", "logs"


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


class Journal(Record, kw_only=True):
    """The content of `recipe.json`."""

    title: str
    recipe: str
    """The hash of the recipe at the last run."""
    inputs: dict[str, str]
    """The hash of each input at the start; of one that is no file, its name."""
    stages: dict[str, StageRecord] = {}
    plan: dict[str, float] = {}
    """Every stage of the last run, in order, with the seconds that the recipe expects of it; 0: not known."""

    def left(self, now: float) -> float | None:
        """Return the seconds that are left, or None if nothing is known of the stages to come. What the recipe expects
        is scaled by how long the stages that passed took of it.

        Args:
            now: the time, in seconds since 1970.
        """
        passed = {name: record for name, record in self.stages.items() if record.status == "passed"}
        expected = sum(self.plan.get(name, 0.0) for name in passed)
        taken = sum(record.seconds for name, record in passed.items() if self.plan.get(name))
        pace = taken / expected if expected else 1.0
        rest = {name: seconds * pace for name, seconds in self.plan.items() if name not in passed}
        for name, record in self.stages.items():
            if record.status == "running" and name in rest:
                rest[name] = max(0.0, rest[name] - record.seconds - (now - record.began))
        return sum(rest.values()) if any(self.plan[name] for name in rest) or not rest else None

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
            lock(file, f"{work} is at work in another process")
            yield
