"""Tries settings of a recipe in parallel trials, by Optuna: its storage, sampler and pruner, our stages and gates.

The stages that no searched setting reaches are run once, in `shared`. A trial is the rest of the recipe in a folder of
its own; it is stopped by a gate, or where it looks worse than the median of the trials before. A stopped tuning goes on
with the same command, and each trial at work with its recipe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.errors import MALFORMED, SchemaError, UsageError, optional
from harness1.hashing import digest
from harness1.recipe.experience import Experience
from harness1.recipe.journal import StageRecord, held
from harness1.recipe.recipe import Objective, Recipe, Space, Value
from harness1.recipe.run import Execute, RecipeRun, StageFailed, Watch
from harness1.recipe.trials import (
    TrialResult,
    is_near,
    objective_of,
    shared_recipe,
    trial_recipe,
    within,
)
from harness1.records import Record
from harness1.runs.files import write_json
from harness1.runs.journal import read_lines

if TYPE_CHECKING:
    import optuna

TUNING, RESULTS, STORAGE, SHARED = "tuning.json", "trials.jsonl", "optuna.log", "shared"
NAME = "tuning"
WARM = 2
"""Trials that must have passed a look before it stops another one."""
DRAWS = 50
"""Draws for one trial, while those that come close to failed settings are put back."""
BROKEN = 3
"""Commands that may fail in a row before the tuning ends: the cause is then not the settings."""
NUMBER = "number"
"""The attribute of a trial with its number here: those that were learned, or drawn and put back, have none."""


class TuningCard(Record, kw_only=True):
    """The content of `tuning.json`."""

    title: str
    recipe: str
    """The hash of the recipe."""
    search: dict[str, Space]
    maximize: bool
    metric: str
    subject: str = ""
    """What the experience is about; empty if none is kept."""


class Pruned(Exception):
    """A trial that looks worse than others at the same stage."""


@dataclass
class Tuning:
    """The trials of a recipe in one folder."""

    recipe: Recipe
    out: Path
    execute: Execute
    watch: Callable[[int | None], Watch]
    """Returns who is told of a trial's stages, by its number; None: of the shared stages."""
    seed: int = 0
    experience: Callable[[Path], Experience] | None = None
    """Returns the experience with the shared stages' folder at hand; None: nothing is read and nothing kept."""
    told: Callable[[TrialResult], None] = lambda result: None
    results: list[TrialResult] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _broken: int = 0
    _ended: bool = False

    def run(self, trials: int, parallel: int) -> list[TrialResult]:
        """Run trials until the folder holds this many, some at the same time; return all results in order.

        Raises:
            UsageError: the recipe has nothing to tune, or the folder holds another tuning.
            StageFailed: a shared stage failed, or commands failed again and again.
            MissingExtra: Optuna is not installed.
        """
        objective_of(self.recipe)
        with optional("tune"):
            import optuna
        with held(self.out, TUNING):
            self.results = read_results(self.out)
            self._refuse_other()
            self._describe()
            RecipeRun(shared_recipe(self.recipe), self.out / SHARED, self.execute, self.watch(None)).run()
            known = self.experience(self.out / SHARED) if self.experience else None
            self._describe(known.subject if known else "")
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._many(self._study(known), known, trials, parallel)
        return sorted(self.results, key=lambda each: each.number)

    def _many(self, study: optuna.Study, known: Experience | None, trials: int, parallel: int) -> None:
        """Run trials in threads. An interrupt reaches their commands, too, and ends them all."""
        at_work = [each for each in study.get_trials() if each.state.name == "RUNNING"]
        waiting = [each for each in at_work if NUMBER in each.user_attrs]

        def work() -> None:
            while not self._ended and (trial := self._next(study, known, waiting, trials)) is not None:
                self._one(study, trial, known)

        with ThreadPoolExecutor(parallel) as pool:
            futures = [pool.submit(work) for _ in range(parallel)]
            try:
                for future in futures:
                    future.result()
            finally:
                self._ended = True

    def _next(
        self, study: optuna.Study, known: Experience | None, waiting: list[Any], trials: int
    ) -> optuna.Trial | None:
        """Return a trial that was interrupted, or a further one with settings that have not failed; None if all are
        begun."""
        import optuna

        with self._lock:
            if waiting:
                return optuna.Trial(study, waiting.pop(0)._trial_id)
            begun = sum(NUMBER in each.user_attrs for each in study.get_trials())
            if begun >= trials:
                return None
            failed = [each.settings for each in self._all(known) if each.failed]
            for _ in range(DRAWS):
                trial = study.ask()
                settings = self._drawn(trial)
                if not any(is_near(settings, each, self.recipe.search) for each in failed):
                    break
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                return None
            trial.set_user_attr(NUMBER, begun)
            return trial

    def _one(self, study: optuna.Study, trial: optuna.Trial, known: Experience | None) -> None:
        """Run a trial, and tell everybody who learns from it."""
        import optuna

        objective, states = objective_of(self.recipe), optuna.trial.TrialState
        number, settings = int(trial.user_attrs[NUMBER]), self._drawn(trial)
        folder = self.out / f"trial-{number:04}"
        watch = _Looks(self.watch(number), objective.looks, trial, self._lock)
        recipe = trial_recipe(self.recipe, settings, self.out / SHARED)
        result = TrialResult(number=number, settings=settings)
        try:
            journal = RecipeRun(recipe, folder, self.execute, watch).run()
            result = msgspec.structs.replace(result, value=_value(objective, journal.stages[objective.stage]))
        except Pruned as reason:
            result = msgspec.structs.replace(result, stopped=str(reason))
        except StageFailed as error:
            result = msgspec.structs.replace(result, stopped=str(error), failed=True)
            self._refuse_broken(error)
        result = msgspec.structs.replace(result, looks=watch.seen, seconds=watch.seconds)
        with self._lock:
            if result.value is not None:
                study.tell(trial, result.value)
            else:
                study.tell(trial, state=states.PRUNED)
            self.results.append(result)
            _append(self.out / RESULTS, result)
            if known is not None:
                known.keep(result)
            self.told(result)

    def _refuse_broken(self, error: StageFailed) -> None:
        """Raise the error if the last commands all failed by themselves: then the settings are not the cause."""
        with self._lock:
            self._broken = self._broken + 1 if not error.record.findings else 0
            if self._broken >= BROKEN:
                self._ended = True
                raise error

    def _drawn(self, trial: optuna.Trial) -> dict[str, Value]:
        return {name: _suggested(trial, name, space) for name, space in self.recipe.search.items()}

    def _all(self, known: Experience | None) -> list[TrialResult]:
        return [*self.results, *(known.results() if known else ())]

    def _study(self, known: Experience | None) -> optuna.Study:
        """Open the study; a new one begins with what earlier tunings learned, and tries their best settings first."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        maximize = objective_of(self.recipe).maximize
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self.out / STORAGE))),
            study_name=NAME,
            load_if_exists=True,
            direction="maximize" if maximize else "minimize",
            sampler=optuna.samplers.TPESampler(seed=self.seed + len(self.results), n_startup_trials=5),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=WARM, n_min_trials=WARM),
        )
        if known is None or study.get_trials():
            return study
        learned = [
            each for each in known.results() if within(each.settings, self.recipe.search) and each.value is not None
        ]
        learned.sort(key=lambda each: -(each.value or 0.0) if maximize else (each.value or 0.0))
        ranges = {name: _distribution(space) for name, space in self.recipe.search.items()}
        for each in learned:
            study.add_trial(optuna.trial.create_trial(params=each.settings, distributions=ranges, value=each.value))
        if learned:
            study.enqueue_trial(learned[0].settings)
        return study

    def _refuse_other(self) -> None:
        found = read_card(self.out)
        if found is not None and found.recipe != digest([self.recipe.hash, self.recipe.search]):
            raise UsageError(f"{self.out} holds trials of another recipe: choose another --out")

    def _describe(self, subject: str = "") -> None:
        objective = objective_of(self.recipe)
        card = TuningCard(
            title=self.recipe.title,
            recipe=digest([self.recipe.hash, self.recipe.search]),
            search=self.recipe.search,
            maximize=objective.maximize,
            metric=f"{objective.metric} of {objective.stage}",
            subject=subject,
        )
        write_json(self.out / TUNING, card)


class _Looks:
    """Watches a trial, adds its time up, and stops it at a look."""

    def __init__(self, watch: Watch, looks: dict[str, str], trial: optuna.Trial, lock: threading.Lock) -> None:
        self.watch, self.looks, self.trial, self.lock = watch, looks, trial, lock
        self.seen: dict[str, float] = {}
        self.seconds = 0.0

    def begins(self, stage: str, says: str) -> None:
        self.watch.begins(stage, says)

    def skipped(self, stage: str, record: StageRecord) -> None:
        self.watch.skipped(stage, record)
        self._seen(stage, record)

    def ended(self, stage: str, record: StageRecord) -> None:
        self.watch.ended(stage, record)
        value = self._seen(stage, record)
        if value is None:
            return
        with self.lock:
            self.trial.report(value, [*self.looks].index(stage))
            worse = self.trial.should_prune()
        if worse:
            raise Pruned(f"{self.looks[stage]} of {stage} was {value:.4g}, worse than the median")

    def _seen(self, stage: str, record: StageRecord) -> float | None:
        """Note a stage; return what a look sees of it, or None if it sees nothing."""
        self.seconds += record.seconds
        value = record.metrics.get(self.looks.get(stage, ""))
        if value is None or record.status != "passed":
            return None
        self.seen[stage] = value
        return value


def read_card(out: Path) -> TuningCard | None:
    """Return the card of a tuning's folder, or None if it has none; raise SchemaError if it is damaged."""
    path = out / TUNING
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=TuningCard)
    except MALFORMED as error:
        raise SchemaError(f"{path} is not the card of a tuning: {error}") from error


def read_results(out: Path) -> list[TrialResult]:
    """Return the results in a tuning's folder in the order in which trials ended; raise SchemaError if one is
    damaged."""
    path = out / RESULTS
    if not path.is_file():
        return []
    try:
        return [msgspec.json.decode(line, type=TrialResult) for _, line in read_lines(path)]
    except MALFORMED as error:
        raise SchemaError(f"{path} has a line that is not the result of a trial: {error}") from error


def _value(objective: Objective, record: StageRecord) -> float:
    """Return what a trial is compared by; raise UsageError if its stage has no such metric."""
    if objective.metric not in record.metrics:
        raise UsageError(f"{objective.stage} has no metric {objective.metric}; it has {', '.join(record.metrics)}")
    return record.metrics[objective.metric]


def _append(path: Path, result: TrialResult) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def _suggested(trial: optuna.Trial, name: str, space: Space) -> Value:
    if space.choices:
        chosen: Value = trial.suggest_categorical(name, space.choices)  # type: ignore[assignment]
        return chosen
    assert space.low is not None
    assert space.high is not None
    if space.whole:
        return trial.suggest_int(name, int(space.low), int(space.high), log=space.log)
    return trial.suggest_float(name, space.low, space.high, log=space.log)


def _distribution(space: Space) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.choices:
        return CategoricalDistribution(space.choices)
    assert space.low is not None
    assert space.high is not None
    if space.whole:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)
