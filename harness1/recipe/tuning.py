"""Tries settings of a recipe in parallel trials, by Optuna: its storage, sampler and pruner, our stages and gates.

The stages that no searched setting reaches are run once, in `shared`; a trial is the rest of the recipe in a folder of
its own, stopped by a gate, or where it looks worse than the median. What trials found is kept for later tunings of the
same corpus, reward and size of model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from harness1.config import load_config
from harness1.errors import UsageError, optional
from harness1.models.fetch import resolve_model
from harness1.plain import digest
from harness1.recipe.gates import StageCase, artifact
from harness1.recipe.recipe import Objective, Recipe, Space, Value, names_in, put_setting, recipe_of
from harness1.recipe.run import Event, Execute, RecipeRun, StageFailed, StageRecord, Watch, hold_folder
from harness1.records import Record
from harness1.runs.files import read_record, write_json
from harness1.runs.journal import Journal, read_line_records

if TYPE_CHECKING:
    import optuna

EXPERIENCE = Path("~/.cache/harness1/experience")
TUNING, RESULTS, STORAGE, SHARED = "tuning.json", "trials.jsonl", "optuna.log", "shared"
NAME = "tuning"
NEAR = 0.05
"""Share of a range within which two values of a setting count as the same."""
WARM = 2
"""Trials that must have passed a look before it stops another one."""
DRAWS = 50
"""Draws for one trial, while those that come close to failed settings are put back."""
BROKEN = 3
"""Commands that may fail in a row before the tuning ends: the cause is then not the settings."""
NUMBER = "number"
"""The attribute of a trial with its number here: those that were learned, or drawn and put back, have none."""


class TrialResult(Record, kw_only=True):
    """What came out of one trial: all that later tunings learn from it."""

    number: int
    settings: dict[str, Value]
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


def objective_of(recipe: Recipe) -> Objective:
    """Return what trials of a recipe are compared by; raise UsageError if it does not say, or varies nothing."""
    if recipe.objective is None or not recipe.search:
        raise UsageError("the recipe has no [search] or no [objective]: nothing to tune")
    return recipe.objective


def list_varied_stages(recipe: Recipe) -> frozenset[str]:
    """Return the stages that a searched setting reaches, directly or through a stage before."""
    own = {key.partition(".")[0] for key in recipe.search if key not in recipe.values}
    values = {key for key in recipe.search if key in recipe.values}
    own |= {name for name, stage in recipe.stages.items() if values & set(names_in(stage))}
    return frozenset(name for name in recipe.stages if name in own or own & recipe.upstream(name))


def list_needed_stages(recipe: Recipe) -> tuple[str, ...]:
    """Return the stages that the objective and its looks need, in order."""
    objective = objective_of(recipe)
    ends = [objective.stage, *objective.looks]
    needed = frozenset(ends).union(*(recipe.upstream(name) for name in ends))
    return tuple(name for name in recipe.stages if name in needed)


def cut_shared_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the stages that all trials have in common."""
    varied = list_varied_stages(recipe)
    kept = {name: recipe.stages[name] for name in list_needed_stages(recipe) if name not in varied}
    return replace(recipe, stages=kept, search={}, objective=None)


def trial_recipe(recipe: Recipe, settings: Mapping[str, Value], shared: Path) -> Recipe:
    """Return the recipe of one trial: the stages that its settings reach, over the folders of the shared ones."""
    varied = list_varied_stages(recipe)
    tree = msgspec.to_builtins(recipe)
    for key, value in settings.items():
        put_setting(tree, key, value)
    tree["inputs"] |= {name: str(shared / name) for name in cut_shared_recipe(recipe).stages}
    tree["stages"] = {name: tree["stages"][name] for name in list_needed_stages(recipe) if name in varied}
    return recipe_of(tree | {"search": {}, "objective": None}, recipe.title)


def is_near(one: Mapping[str, Value], other: Mapping[str, Value], search: Mapping[str, Space]) -> bool:
    """Return whether two trials have nearly the same settings: equal choices, and numbers that differ by less than
    `NEAR` of their range, on the scale on which they are drawn."""
    if not search.keys() <= one.keys() & other.keys():
        return False
    for name, space in search.items():
        a, b = one[name], other[name]
        if isinstance(a, str) or isinstance(b, str) or space.low is None or space.high is None:
            is_close = a == b
        else:
            low, high, x, y = (math.log(each) if space.log else float(each) for each in (space.low, space.high, a, b))
            is_close = abs(x - y) < NEAR * (high - low)
        if not is_close:
            return False
    return True


def best_of(results: Sequence[TrialResult], *, maximize: bool) -> TrialResult | None:
    """Return the result with the best value, the first of equal ones; None if no trial ended."""
    ended = [each for each in results if each.value is not None and math.isfinite(each.value)]
    sign = -1.0 if maximize else 1.0
    return min(ended, key=lambda each: sign * (each.value or 0.0), default=None)


def tuning_subject(recipe: Recipe, shared: Path) -> str:
    """Return the hash of what a tuning is about: the documents as they are indexed, the reward of the objective's
    stage, the size of the model as a power of two, the objective, and the names of the settings that are varied.
    `shared`: the folder of the shared stages, which are done."""
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
    """The results of earlier trials about one subject, a line each; processes may append at the same time."""

    folder: Path
    subject: str

    @property
    def file(self) -> str:
        return f"{self.subject[:16]}.jsonl"

    def results(self) -> list[TrialResult]:
        """Return what earlier trials left, oldest first; raise SchemaError for a line that is damaged."""
        return read_results(self.folder, self.file)

    def keep(self, result: TrialResult) -> None:
        """Append the result of a trial."""
        with Journal(self.folder, self.file, wait=True) as journal:
            journal.write(msgspec.json.encode(result))


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
    on_result: Callable[[TrialResult], None] = lambda result: None
    results: list[TrialResult] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _broken: int = 0
    _ended: bool = False

    def run(self, trials: int, parallel: int) -> list[TrialResult]:
        """Run trials until the folder holds this many, some at the same time; return all results in order. Raises
        UsageError: the recipe has nothing to tune, or the folder holds another tuning; StageFailed: a shared stage
        failed, or commands failed again and again; MissingExtra: Optuna is not installed."""
        objective_of(self.recipe)
        with optional("tune"):
            import optuna
        with hold_folder(self.out, TUNING):
            self.results = read_results(self.out)
            self._describe()
            RecipeRun(cut_shared_recipe(self.recipe), self.out / SHARED, self.execute, self.watch(None)).run()
            known = self.experience(self.out / SHARED) if self.experience else None
            self._describe(known.subject if known else "")
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            with Journal(self.out, RESULTS) as journal:
                self._run_trials(self._open_study(known), known, journal, trials, parallel)
        return sorted(self.results, key=lambda each: each.number)

    def _run_trials(
        self, study: optuna.Study, known: Experience | None, journal: Journal, trials: int, parallel: int
    ) -> None:
        """Run trials in threads. An interrupt reaches their commands, too, and ends them all."""
        at_work = [each for each in study.get_trials() if each.state.name == "RUNNING"]
        waiting = [each for each in at_work if NUMBER in each.user_attrs]

        def work() -> None:
            while not self._ended and (trial := self._next(study, known, waiting, trials)) is not None:
                self._run_trial(study, trial, known, journal)

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
            earlier = [*self.results, *(known.results() if known else ())]
            failed = [each.settings for each in earlier if each.failed]
            for _ in range(DRAWS):
                trial = study.ask(_distributions(self.recipe))
                if not any(is_near(trial.params, each, self.recipe.search) for each in failed):
                    trial.set_user_attr(NUMBER, begun)
                    return trial
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return None

    def _run_trial(self, study: optuna.Study, trial: optuna.Trial, known: Experience | None, journal: Journal) -> None:
        """Run a trial, and tell everybody who learns from it."""
        import optuna

        objective, number = objective_of(self.recipe), int(trial.user_attrs[NUMBER])
        watch = _Looks(self.watch(number), objective.looks, trial, self._lock)
        recipe = trial_recipe(self.recipe, trial.params, self.out / SHARED)
        result = TrialResult(number=number, settings=trial.params)
        try:
            state = RecipeRun(recipe, self.out / f"trial-{number:04}", self.execute, watch).run()
            metrics = state.stages[objective.stage].metrics
            if objective.metric not in metrics:
                raise UsageError(f"{objective.stage} has no metric {objective.metric}; it has {', '.join(metrics)}")
            result = replace(result, value=metrics[objective.metric])
        except _Pruned as reason:
            result = replace(result, stopped=str(reason))
        except StageFailed as error:
            result = replace(result, stopped=str(error), failed=True)
            with self._lock:
                self._broken = self._broken + 1 if not error.record.findings else 0
                if self._broken >= BROKEN:  # the commands fail by themselves: the settings are not the cause
                    self._ended = True
                    raise
        result = replace(result, looks=watch.seen, seconds=watch.seconds)
        with self._lock:
            study.tell(trial, result.value, None if result.value is not None else optuna.trial.TrialState.PRUNED)
            self.results.append(result)
            journal.write(msgspec.json.encode(result))
            if known is not None:
                known.keep(result)
            self.on_result(result)

    def _open_study(self, known: Experience | None) -> optuna.Study:
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
        ranges, learned = _distributions(self.recipe), list[optuna.trial.FrozenTrial]()
        for each in known.results():
            with suppress(ValueError):  # it was stopped, or its settings cannot be drawn here
                made = optuna.trial.create_trial(params=each.settings, distributions=ranges, value=each.value)
                learned.append(made)
        learned.sort(key=lambda each: each.value or 0.0, reverse=maximize)
        study.add_trials(learned)
        if learned:
            study.enqueue_trial(learned[0].params)
        return study

    def _describe(self, subject: str = "") -> None:
        """Write the card; raise UsageError if the folder has that of another recipe."""
        objective, found = objective_of(self.recipe), read_tuning(self.out)
        card = TuningCard(
            title=self.recipe.title,
            recipe=digest([self.recipe.hash, self.recipe.search]),
            search=self.recipe.search,
            maximize=objective.maximize,
            metric=f"{objective.metric} of {objective.stage}",
            subject=subject,
        )
        if found is not None and found.recipe != card.recipe:
            raise UsageError(f"{self.out} holds trials of another recipe: choose another --out")
        write_json(self.out / TUNING, card)


class _Pruned(Exception):
    """A trial that looks worse than others at the same stage."""


@dataclass
class _Looks:
    """Watches a trial, adds its time up, and stops it at a look."""

    watch: Watch
    looks: dict[str, str]
    trial: optuna.Trial
    lock: threading.Lock
    seen: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __call__(self, event: Event, stage: str, record: StageRecord) -> None:
        self.watch(event, stage, record)
        if event == "begins":
            return
        self.seconds += record.seconds
        value = record.metrics.get(self.looks.get(stage, ""))
        if value is None or record.status != "passed":
            return
        self.seen[stage] = value
        if event == "ends":
            with self.lock:
                self.trial.report(value, [*self.looks].index(stage))
                is_worse = self.trial.should_prune()
            if is_worse:
                raise _Pruned(f"{self.looks[stage]} of {stage} was {value:.4g}, worse than the median")


def read_tuning(out: Path) -> TuningCard | None:
    """Return the card of a tuning's folder, or None if it has none; raise SchemaError if it is damaged."""
    return read_record(out / TUNING, TuningCard, "the card of a tuning")


def read_results(out: Path, file: str = RESULTS) -> list[TrialResult]:
    """Return the results of trials in the order in which they ended; raise SchemaError if one is damaged."""
    path = out / file
    return list(read_line_records(path, TrialResult, "the result of a trial")) if path.is_file() else []


def _distributions(recipe: Recipe) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    ranges: dict[str, Any] = {}
    for name, space in recipe.search.items():
        if space.low is None or space.high is None:
            ranges[name] = CategoricalDistribution(space.choices)
        elif space.whole:
            ranges[name] = IntDistribution(int(space.low), int(space.high), log=space.log)
        else:
            ranges[name] = FloatDistribution(space.low, space.high, log=space.log)
    return ranges
