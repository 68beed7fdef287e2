"""Runs the stages of a recipe in order, each in a process of its own, with gates between them. Nothing is done twice.

After a kill at any moment the same command goes on: a stage that had passed is not touched, and the verb of one that
was at work resumes it. `recipe.json` says which stages are done, from what, and what their gates found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec import to_builtins
from msgspec.structs import replace

from harness1.config import load_config
from harness1.errors import HarnessError, UsageError
from harness1.plain import at_home, file_digest
from harness1.recipe.gates import GateRuling, Parse, StageCase, artifact, hash_input, judge_stage, metrics_of
from harness1.recipe.recipe import Recipe
from harness1.records import Record
from harness1.runs.files import lock, read_record, read_stage, write_json, writing

JOURNAL, LOCK, LOGS = "recipe.json", ".lock", "logs"
TRIES, PAUSE_S = 5, 0.1
HASHING = 3
"""The version of the hashes of inputs and results."""
_CODE_BEGINS, _CODE_ENDS = re.compile(r"""^|(?<=["'=,:\[])"""), re.compile(r"\.py(?=:[^\W\d])")
"""Where `FILE.py:NAME` may begin and end within a word; the path may hold any of these characters."""


class StageRecord(Record, kw_only=True):
    """What is known of one stage."""

    words: tuple[str, ...]
    """Its command, without `harness1`."""
    needs: dict[str, str]
    """The hash of everything that it used, by the name of stage or input, or by the path of settings and code."""
    status: Literal["running", "passed", "failed"]
    artifact: str = ""
    """The hash of what it made."""
    gates: dict[str, float | bool] = {}
    """The recipe's own bounds."""
    findings: tuple[GateRuling, ...] = ()
    seconds: float = 0.0
    """The time that its command took, over all attempts."""
    exit: int = 0
    """The exit code of its command."""
    metrics: dict[str, float] = {}
    began: float = 0.0
    """When its command was last started, in seconds since 1970."""

    def status_now(self, at_work: bool) -> str:
        """Return the status; `stopped` where no process is at work on a stage that did not end."""
        return "stopped" if self.status == "running" and not at_work else self.status


class StagePlan(Record):
    """What a recipe says of a stage before it begins."""

    says: str = ""
    takes: float = 0.0
    """The seconds that it took on two quiet cores; 0: not known."""


class RecipeState(Record, kw_only=True):
    """The content of `recipe.json`."""

    title: str
    recipe: str
    """The hash of the recipe at the last run."""
    inputs: dict[str, str]
    """The hash of each input at the start; of one that is no file, its name."""
    stages: dict[str, StageRecord] = {}
    plan: dict[str, StagePlan] = {}
    """Every stage of the last run, in order."""
    hashing: int = 1

    def times(self) -> dict[str, float]:
        """Return the seconds of stages to come (0: not known), at the pace of those passed and a tenth of the plan."""
        passed = {name: record for name, record in self.stages.items() if record.status == "passed"}
        known = [name for name in passed if name in self.plan and self.plan[name].takes]
        share = sum(stage.takes for stage in self.plan.values()) / 10
        planned = share + sum(self.plan[name].takes for name in known)
        pace = (share + sum(passed[name].seconds for name in known)) / planned if planned else 1.0
        return {name: stage.takes * pace for name, stage in self.plan.items() if name not in passed}

    def time_left(self, now: float) -> float | None:
        """Return the seconds that are left at a time, or None if nothing is known of the stages to come."""
        rest = self.times()
        if rest and not any(rest.values()):
            return None
        for name, record in self.stages.items():
            if record.status == "running" and name in rest:
                rest[name] = max(0.0, rest[name] - record.seconds - (now - record.began))
        return sum(rest.values())


def read_recipe_state(work: Path) -> RecipeState | None:
    """Return the state of a folder, or None if it has none; raise SchemaError if it is damaged."""
    return read_record(work / JOURNAL, RecipeState, "the journal of a recipe")


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
def hold_folder(work: Path, mark: str = JOURNAL) -> Iterator[None]:
    """Hold a folder, which has a file `mark`, against other processes. Raises UsageError: it is held, or foreign."""
    with writing(work):
        if work.exists() and not (work / mark).exists() and any(each.name != LOCK for each in work.iterdir()):
            raise UsageError(f"{work} is not empty and holds no recipe: choose another --out")
        work.mkdir(parents=True, exist_ok=True)
        with (work / LOCK).open("w") as file:
            for _ in range(TRIES - 1):
                try:
                    lock(file, "")
                    break
                except UsageError:  # perhaps by one that only looks whether somebody is at work
                    time.sleep(PAUSE_S)
            else:
                lock(file, f"{work} is at work in another process")
            yield


Execute = Callable[[Sequence[str], Path, int], int]
"""Runs a command in a number of processes that train together; returns its exit code. The file is for its output."""
FAULTY = 3
"""The exit code of an evaluation whose episodes the infrastructure broke; the gate `faults` judges it."""
INTERRUPTED = 130


Event = Literal["begins", "had passed", "ends"]
Watch = Callable[[Event, str, StageRecord], None]
"""Called with what becomes of a stage, its name, and its record."""


class StageFailed(HarnessError):
    """A stage's command failed, or one of its gates did; those after it do not run."""

    def __init__(self, stage: str, record: StageRecord) -> None:
        self.stage, self.record = stage, record
        failed = [each for each in record.findings if not each.passed]
        reason = put_in_words(failed[0]) if failed else f"its command ended with exit code {record.exit}"
        super().__init__(f"stage {stage} failed: {reason}")


@dataclass
class RecipeRun:
    """The work of one recipe in one folder."""

    recipe: Recipe
    work: Path
    execute: Execute
    watch: Watch
    parse: Parse
    state: RecipeState = field(init=False)

    def run(self, start_from: str = "", until: str = "") -> RecipeState:
        """Run every stage that has not passed. `start_from`: this stage and all that use its result are done again.
        `until`: the last stage to run; empty for all. Raises UsageError: the folder or the recipe is not what it was,
        or there is no such stage; StageFailed: a command or a gate failed."""
        names, stages = self.recipe.until(until), self.recipe.stages
        again = self.recipe.from_stage(start_from) if start_from else ()
        with hold_folder(self.work):
            inputs = {name: self._hash(name) for name in self.recipe.inputs}
            new = RecipeState(title=self.recipe.title, recipe="", inputs=inputs, hashing=HASHING)
            state = self._hashed_anew(read_recipe_state(self.work) or new)
            if changed := [name for name, known in state.inputs.items() if inputs.get(name) != known]:
                said = f"{self.work} was begun with other inputs ({', '.join(changed)})"
                raise UsageError(f"{said}: restore them, or choose another --out")
            plan = {name: StagePlan(stages[name].says, stages[name].takes) for name in names}
            self.state = replace(state, recipe=self.recipe.hash, inputs={**inputs, **state.inputs}, plan=plan)
            self._write({name: record for name, record in state.stages.items() if name not in again})
            for name in again:
                place = self.work / name
                shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
            for name in names:
                self._pass_stage(name)
            return self.state

    def _hashed_anew(self, state: RecipeState) -> RecipeState:
        """Return a state with what an earlier version hashed otherwise to be run again, which finds its work done."""
        if state.hashing == HASHING:
            return state
        stages = dict(state.stages)
        for name, record in stages.items():
            if record.status == "passed" and record.artifact != artifact(self.work / name):
                stages[name] = replace(record, status="running")
        return replace(state, inputs={}, stages=stages, hashing=HASHING)

    def _pass_stage(self, name: str) -> None:
        stage, words, before = self.recipe.stages[name], self.recipe.words(name, self.work), self.state.stages.get(name)
        made = {each: record.artifact for each, record in self.state.stages.items()}
        files = {each: self._hash(each) for each in self._files_of(words)}
        needs = {each: (self.state.inputs | made)[each] for each in self.recipe.needs(name)} | files
        if before is not None and before.status == "failed" and not (self.work / name).exists():
            before = None  # it made nothing that other settings could spoil
        used = before.needs if before else {}
        edited = [each for each in files if used.get(each, files[each]) != files[each]]
        gone = [each for each in used if Path(each).is_absolute() and each not in files]
        edited += [each for each in gone if used[each] not in files.values()]  # a link leads elsewhere; else all moved
        if before is not None and (before.words != words or edited):
            changed = [word for word in (*words, *before.words) if (word in before.words) != (word in words)] + edited
            raise UsageError(
                f"stage {name} was run with other settings ({', '.join(dict.fromkeys(changed)) or 'in their order'}):"
                f" --from {name} does it again, with all that use it"
            )
        record = before or StageRecord(words=words, needs=needs, status="running")
        record = replace(record, needs=needs, gates=stage.gates)
        own = {name: before.artifact} if before is not None and before.status == "passed" else {}
        if changes := self._changes(own | needs):
            self._keep(name, replace(record, findings=changes, status="failed"))
        elif before == record and before.status == "passed":
            self.watch("had passed", name, before)
        else:
            self._run_stage(name, replace(record, status="running", findings=(), began=time.time()))

    def _run_stage(self, name: str, record: StageRecord) -> None:
        self._write({**self.state.stages, name: record})
        self.watch("begins", name, record)
        began, place = time.monotonic(), self.work / name
        try:
            code = self.execute(record.words, self.work / LOGS / f"{name}.log", self.recipe.stages[name].processes)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("the same command goes on from here")
            raise
        record = replace(record, seconds=record.seconds + time.monotonic() - began, exit=code, status="failed")
        card = read_stage(place) if code == FAULTY else None
        if code == 0 or (card is not None and card.status == "finished" and "failures" in card.gates):
            case = StageCase(*self.parse(record.words), place)
            findings = (*judge_stage(case, record.gates), *self._changes(record.needs))
            record = replace(record, findings=findings, metrics=metrics_of(place))
            if all(each.passed for each in findings):
                record = replace(record, status="passed", artifact=artifact(place))
        self._keep(name, record)

    def _keep(self, name: str, record: StageRecord) -> None:
        self._write({**self.state.stages, name: record})
        self.watch("ends", name, record)
        if record.status != "passed":
            raise StageFailed(name, record)

    def _write(self, stages: dict[str, StageRecord]) -> None:
        self.state = replace(self.state, stages=stages)
        write_json(self.work / JOURNAL, self.state)

    def _changes(self, expected: Mapping[str, str]) -> tuple[GateRuling, ...]:
        changed = [each for each, known in expected.items() if self._hash(each) != known]
        looks = [f"harness1 recipe run ... --from {each}" if each in self.recipe.stages else "" for each in changed]
        says = [f"changes to {each}" for each in changed]
        return tuple(GateRuling("unchanged", 1.0, 0.0, False, *each) for each in zip(says, looks, strict=True))

    def _files_of(self, words: Sequence[str]) -> list[str]:
        """Return the files of settings and of own code that a command or its settings name, but those of `work`."""
        given, texts = self.parse(words)[1], [*words]
        config = given.get("--config")
        with suppress(UsageError):  # which the command meets, too
            settings = load_config(config, list(given.get("--set") or ()))
            texts += _texts_in(to_builtins(replace(settings, machine=settings.machine.public())))
        named = [config or ""]
        for text in texts:
            for end in _CODE_ENDS.finditer(text):
                named += (text[begin.end() : end.end()] for begin in _CODE_BEGINS.finditer(text, 0, end.start()))
        files = {path.resolve() for path in map(at_home, named) if path.is_file()}
        return sorted(str(each) for each in files if not each.is_relative_to(self.work.resolve()))

    def _hash(self, name: str) -> str:
        """Return the hash of what a stage made, of an input, or of a file that a command names."""
        if name in self.recipe.stages:
            return artifact(self.work / name)
        if name not in self.recipe.inputs:
            return file_digest(Path(name))
        follows = any("--follow-links" in stage.run for stage in self.recipe.stages.values())
        return hash_input(self.recipe.inputs[name], follow_links=follows)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text in plain data, names of settings among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts_in(each)


def run_verb(words: Sequence[str], log: Path, processes: int = 1, *, quiet: bool = False) -> int:
    """Run a command in processes that end with this one; return its exit code. `log`: for its output, if `quiet`."""
    code = "from harness1.recipe import run_on_leash; run_on_leash()"
    command = [sys.executable, "-c", code, str(os.getpid()), str(processes), *words]
    if not quiet:
        return _wait(subprocess.Popen(command))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return _wait(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process. An interrupt reaches it, too: its work is saved before this one ends."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def put_in_words(finding: GateRuling) -> str:
    """Return what a gate found in one line."""
    value = "not finite" if finding.value is None else f"{finding.value:.4g}"
    look = f"; look closer: {finding.look}" if finding.look else ""
    return f"gate {finding.gate}: {finding.says}: {value}, bound {finding.bound:g}{look}"
