"""Runs the stages of a recipe in order, each in a process of its own, with gates between them. Nothing is done twice.

After a kill at any moment the same command goes on: a stage that had passed is not touched, and the verb of one that
was at work resumes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from harness1.errors import HarnessError, UsageError
from harness1.recipe.artifacts import artifact
from harness1.recipe.gates import Finding, judged
from harness1.recipe.journal import LOGS, Journal, Planned, StageRecord, held, read_journal, write_journal
from harness1.recipe.measures import metrics_of
from harness1.recipe.recipe import Recipe
from harness1.recipe.stage_case import StageCase
from harness1.runs.stage import read_stage

Execute = Callable[[Sequence[str], Path, int], int]
"""Runs a command of `harness1`, in a number of processes that train together, and returns its exit code. The file is
for its output, if it is not to be shown."""
FAULTY = 3
"""The exit code of an evaluation whose episodes the infrastructure broke; the gate `faults` judges it."""
INTERRUPTED = 130


class Watch(Protocol):
    """Is told how a recipe goes on."""

    def begins(self, stage: str, says: str) -> None:
        """A stage's command is about to run."""

    def skipped(self, stage: str, record: StageRecord) -> None:
        """A stage had passed before."""

    def ended(self, stage: str, record: StageRecord) -> None:
        """A stage has passed or failed."""


class StageFailed(HarnessError):
    """A stage's command failed, or one of its gates did; those after it do not run."""

    def __init__(self, stage: str, record: StageRecord) -> None:
        self.stage, self.record = stage, record
        failed = [each for each in record.findings if not each.passed]
        reason = worded(failed[0]) if failed else f"its command ended with exit code {record.exit}"
        super().__init__(f"stage {stage} failed: {reason}")


@dataclass(frozen=True)
class RecipeRun:
    """The work of one recipe in one folder."""

    recipe: Recipe
    work: Path
    execute: Execute
    watch: Watch

    def run(self, start_from: str = "", until: str = "") -> Journal:
        """Run every stage that has not passed.

        Args:
            start_from: this stage and all that use its result are done again.
            until: the last stage to run; empty for all.

        Raises:
            UsageError: the folder or the recipe is not what it was, or there is no such stage.
            StageFailed: a command or a gate failed.
        """
        names = self.recipe.until(until)
        again = self.recipe.from_stage(start_from) if start_from else ()
        with held(self.work):
            stages = self.recipe.stages
            plan = {name: Planned(stages[name].says, stages[name].takes) for name in names}
            journal = msgspec.structs.replace(self._begun(), plan=plan)
            write_journal(self.work, journal)
            journal = self._cleared(journal, again)
            for name in names:
                journal = self._stage(name, journal)
            return journal

    def _begun(self) -> Journal:
        """Return the journal to go on with, and check that inputs are what they were at the start."""
        inputs = {name: self._hash(name) for name in self.recipe.inputs}
        journal = read_journal(self.work)
        if journal is None:
            return Journal(title=self.recipe.title, recipe=self.recipe.hash, inputs=inputs)
        changed = [name for name in journal.inputs if inputs.get(name) != journal.inputs[name]]
        if changed:
            raise UsageError(
                f"{self.work} was begun with other inputs ({', '.join(changed)}): restore them, or choose another --out"
            )
        return msgspec.structs.replace(journal, recipe=self.recipe.hash, inputs={**inputs, **journal.inputs})

    def _cleared(self, journal: Journal, again: Sequence[str]) -> Journal:
        """Forget stages, and remove what they made."""
        journal = journal.without(again)
        write_journal(self.work, journal)
        for name in again:
            place = self.work / name
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
        return journal

    def _stage(self, name: str, journal: Journal) -> Journal:
        """Skip a stage that has passed, or else run it; return the journal with its record."""
        stage, words, before = self.recipe.stages[name], self.recipe.words(name, self.work), journal.stages.get(name)
        needs = {each: _expected(journal, each) for each in self.recipe.needs(name)}
        if before is not None and before.status == "failed" and not (self.work / name).exists():
            before = None  # it made nothing that other settings could spoil
        if before is not None and before.words != words:
            raise UsageError(
                f"stage {name} was run with other settings ({_difference(before.words, words)}): --from {name} does it"
                " again, with all that use it"
            )
        record = before or StageRecord(words=words, needs=needs, status="running")
        record = msgspec.structs.replace(record, needs=needs, gates=stage.gates)
        made = {name: before.artifact} if before is not None and before.status == "passed" else {}
        if changes := self._changes(made | needs):
            return self._kept(name, journal, msgspec.structs.replace(record, findings=changes, status="failed"))
        if before == record and before.status == "passed":
            self.watch.skipped(name, before)
            return journal
        return self._ran(name, journal, msgspec.structs.replace(record, status="running", findings=()))

    def _ran(self, name: str, journal: Journal, record: StageRecord) -> Journal:
        """Run the command of a stage, and judge what it made."""
        record = msgspec.structs.replace(record, began=time.time())
        write_journal(self.work, journal.with_stage(name, record))
        self.watch.begins(name, self.recipe.stages[name].says)
        began = time.monotonic()
        try:
            code = self.execute(record.words, self.work / LOGS / f"{name}.log", self.recipe.stages[name].processes)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("the same command goes on from here")
            raise
        seconds = record.seconds + time.monotonic() - began
        record = msgspec.structs.replace(record, seconds=seconds, exit=code, status="failed")
        place = self.work / name
        if code == 0 or (code == FAULTY and _is_played(place)):
            findings = (*judged(StageCase(record.words, place), record.gates), *self._changes(record.needs))
            record = msgspec.structs.replace(
                record,
                status="passed" if all(each.passed for each in findings) else "failed",
                findings=findings,
                artifact=artifact(place),
                metrics=dict(metrics_of(place)),
            )
        return self._kept(name, journal, record)

    def _kept(self, name: str, journal: Journal, record: StageRecord) -> Journal:
        """Write a record into the journal; raise StageFailed for one that failed."""
        journal = journal.with_stage(name, record)
        write_journal(self.work, journal)
        self.watch.ended(name, record)
        if record.status != "passed":
            raise StageFailed(name, record)
        return journal

    def _changes(self, expected: Mapping[str, str]) -> tuple[Finding, ...]:
        """Return a finding for every input, and every stage, whose content has not the hash that it had."""
        changed = (name for name, known in expected.items() if self._hash(name) != known)
        stages, look = self.recipe.stages, "harness1 recipe run ... --from {}"
        return tuple(
            Finding("unchanged", 1.0, 0.0, False, f"changes to {each}", look.format(each) if each in stages else "")
            for each in changed
        )

    def _hash(self, name: str) -> str:
        """Return the hash of what a stage made, or of an input; of an input that is no file, its name."""
        if name in self.recipe.stages:
            return artifact(self.work / name)
        place = self.recipe.inputs[name]
        return artifact(Path(place)) or place


def _is_played(place: Path) -> bool:
    """Return True for a finished run that counts its broken episodes."""
    card = read_stage(place)
    return card is not None and card.status == "finished" and "failures" in card.gates


def run_command(words: Sequence[str], log: Path, processes: int = 1, *, quiet: bool = False) -> int:
    """Run a command of `harness1` in a process of its own, which ends with this one; return its exit code.

    Args:
        log: the file for its output, if it is not to be shown.
        processes: start as many by torchrun.
    """
    command = [sys.executable, "-m", "harness1.recipe.leash", str(os.getpid()), str(processes), *words]
    if not quiet:
        return _waited(subprocess.Popen(command))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return _waited(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT))


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process. An interrupt reaches it, too: its work is saved before this one ends."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def worded(finding: Finding) -> str:
    """Return what a gate found in one line."""
    value = "not finite" if finding.value is None else f"{finding.value:.4g}"
    look = f"; look closer: {finding.look}" if finding.look else ""
    return f"gate {finding.gate}: {finding.says}: {value}, bound {finding.bound:g}{look}"


def _expected(journal: Journal, need: str) -> str:
    return journal.stages[need].artifact if need in journal.stages else journal.inputs[need]


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    """Return the words of a command that are not in the other one."""
    words = [word for word in (*now, *before) if (word in before) != (word in now)]
    return ", ".join(dict.fromkeys(words)) or "in their order"
