"""What trials of a recipe share and what each does alone, and the lines that a trial leaves."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.config import load_config
from harness1.errors import MALFORMED, SchemaError, UsageError, optional
from harness1.hashing import digest
from harness1.models.fetch import resolve_model
from harness1.recipe.gates import StageCase, artifact
from harness1.recipe.recipe import Objective, Recipe, Space, Value, put_setting, recipe_of, uses
from harness1.recipe.run import Execute, RecipeRun, StageFailed, StageRecord, Watch, hold_folder
from harness1.records import Record
from harness1.runs.files import lock_or_wait, write_json, writing
from harness1.runs.journal import read_lines

if TYPE_CHECKING:
    import optuna


NEAR = 0.05
"""Share of a range within which two values of a setting count as the same."""

Settings = dict[str, Value]


class TrialResult(Record, kw_only=True):
    """What came out of one trial: all that later tunings learn from it."""

    number: int
    settings: Settings
    value: float | None = None
    """The objective; None for a trial that was stopped."""
    looks: dict[str, float] = {}
    """What was measured on the way, by stage."""
    stopped: str = ""
    """Why it did not end; empty if it did."""
    failed: bool = False
    """A gate or a command failed, so that the settings are not to be tried again."""
    seconds: float = 0.0
    """The time that its own stages took."""


def objective_of(recipe: Recipe) -> Objective:
    """Return what trials of a recipe are compared by; raise UsageError if it does not say, or varies nothing."""
    if recipe.objective is None or not recipe.search:
        raise UsageError("the recipe has no [search] or no [objective]: nothing to tune")
    return recipe.objective


def varied_stages(recipe: Recipe) -> frozenset[str]:
    """Return the stages that a searched setting reaches, directly or through a stage before."""
    own = {key.partition(".")[0] for key in recipe.search if key not in recipe.values}
    values = {key for key in recipe.search if key in recipe.values}
    own |= {name for name, stage in recipe.stages.items() if values & set(uses(stage))}
    return frozenset(name for name in recipe.stages if name in own or own & recipe.upstream(name))


def needed_stages(recipe: Recipe) -> tuple[str, ...]:
    """Return the stages that the objective and its looks need, in order."""
    objective = objective_of(recipe)
    ends = [objective.stage, *objective.looks]
    wanted = frozenset(ends).union(*(recipe.upstream(name) for name in ends))
    return tuple(name for name in recipe.stages if name in wanted)


def shared_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the stages that all trials have in common."""
    varied = varied_stages(recipe)
    kept = {name: recipe.stages[name] for name in needed_stages(recipe) if name not in varied}
    return msgspec.structs.replace(recipe, stages=kept, search={}, objective=None)


def trial_recipe(recipe: Recipe, settings: Mapping[str, Value], shared: Path) -> Recipe:
    """Return the recipe of one trial: the stages that its settings reach, over the folders of the shared ones."""
    varied = varied_stages(recipe)
    ours = [name for name in needed_stages(recipe) if name in varied]
    tree = msgspec.to_builtins(recipe)
    for key, value in settings.items():
        put_setting(tree, key, value)
    tree["inputs"] |= {name: str(shared / name) for name in shared_recipe(recipe).stages}
    tree["stages"] = {name: tree["stages"][name] for name in ours}
    tree |= {"search": {}, "objective": None}
    return recipe_of(tree, recipe.title)


def is_near(one: Mapping[str, Value], other: Mapping[str, Value], search: Mapping[str, Space]) -> bool:
    """Return whether two trials have nearly the same settings: equal choices, and numbers that differ by less than
    `NEAR` of their range, on the scale on which they are drawn."""
    return all(
        name in one and name in other and _close(one[name], other[name], space) for name, space in search.items()
    )


def is_within(settings: Mapping[str, Value], search: Mapping[str, Space]) -> bool:
    """Return whether settings give every searched one a value that trials may draw."""
    return settings.keys() == search.keys() and all(_allowed(settings[name], space) for name, space in search.items())


def best_of(results: Sequence[TrialResult], *, maximize: bool) -> TrialResult | None:
    """Return the result with the best value, the first of equal ones; None if no trial ended."""
    ended = [each for each in results if each.value is not None and math.isfinite(each.value)]
    sign = -1.0 if maximize else 1.0
    return min(ended, key=lambda each: sign * (each.value or 0.0), default=None)


def _close(one: Value, other: Value, space: Space) -> bool:
    if space.choices or isinstance(one, str) or isinstance(other, str) or space.low is None or space.high is None:
        return one == other
    low, high, a, b = (math.log(each) if space.log else float(each) for each in (space.low, space.high, one, other))
    return abs(a - b) < NEAR * (high - low)


def _allowed(value: Value, space: Space) -> bool:
    if space.choices:
        return value in space.choices
    return (
        not isinstance(value, str)
        and space.low is not None
        and space.high is not None
        and space.low <= value <= space.high
    )


FOLDER = Path("~/.cache/harness1/experience")


def subject_of(recipe: Recipe, shared: Path) -> str:
    """Return the hash of what a tuning is about: the documents as they are indexed, the reward of the objective's
    stage, the size of the model as a power of two, the objective, and the names of the settings that are varied.

    Args:
        shared: the folder of the shared stages, which are done.
    """
    objective = objective_of(recipe)
    indexes = [name for name, stage in recipe.stages.items() if stage.run.startswith("index ")]
    corpus = sorted(artifact(shared / name) for name in indexes)
    words = recipe.words(objective.stage, shared)
    settings = [word for before, word in pairwise(words) if before == "--set"]
    config = StageCase(words, shared).option("--config") or None
    size = sum(file.stat().st_size for place in _models(recipe, shared) for file in place.glob("*.safetensors"))
    about = [corpus, load_config(config, settings).reward_hash, max(size, 1).bit_length()]
    return digest([*about, objective.stage, objective.metric, sorted(recipe.search)])


def _models(recipe: Recipe, shared: Path) -> Iterator[Path]:
    for name in recipe.stages:
        model = StageCase(recipe.words(name, shared), shared).option("--model").removeprefix("hf:")
        if model and "@" not in model and not Path(model).is_relative_to(shared):
            yield resolve_model(model)
        elif Path(model).is_dir():
            yield Path(model)


@dataclass(frozen=True)
class Experience:
    """The results of earlier trials about one subject."""

    folder: Path
    subject: str

    @property
    def path(self) -> Path:
        return self.folder / f"{self.subject[:16]}.jsonl"

    def results(self) -> list[TrialResult]:
        """Return what earlier trials left, oldest first; raise SchemaError for a line that is damaged."""
        return list(self._read()) if self.path.is_file() else []

    def keep(self, result: TrialResult) -> None:
        """Append the result of a trial."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self.folder), self.path.open("ab") as file:
            lock_or_wait(file, lambda: None)
            file.write(msgspec.json.encode(result) + b"\n")

    def _read(self) -> Iterator[TrialResult]:
        for number, line in read_lines(self.path):
            try:
                yield msgspec.json.decode(line, type=TrialResult)
            except MALFORMED as error:
                raise SchemaError(f"{self.path}:{number}: not the result of a trial: {error}") from error


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
        with hold_folder(self.out, TUNING):
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
            each for each in known.results() if is_within(each.settings, self.recipe.search) and each.value is not None
        ]
        learned.sort(key=lambda each: -(each.value or 0.0) if maximize else (each.value or 0.0))
        ranges = {name: _distribution(space) for name, space in self.recipe.search.items()}
        for each in learned:
            study.add_trial(optuna.trial.create_trial(params=each.settings, distributions=ranges, value=each.value))
        if learned:
            study.enqueue_trial(learned[0].settings)
        return study

    def _refuse_other(self) -> None:
        found = read_tuning(self.out)
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
        self.seconds += record.seconds
        value = record.metrics.get(self.looks.get(stage, ""))
        if value is None or record.status != "passed":
            return None
        self.seen[stage] = value
        return value


def read_tuning(out: Path) -> TuningCard | None:
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
