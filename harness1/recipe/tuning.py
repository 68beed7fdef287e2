"""Tries settings of a recipe in parallel trials, by Optuna: its sampler and pruner, our journal, stages and gates.

The stages that no searched setting reaches are run once, in `shared`; a trial is the rest of the recipe in a folder of
its own, stopped by a gate, or where it looks worse than the median. A journal has a line when a trial begins and one
when it ends; Optuna's study is made of it at every start. What trials found is kept for later tunings of the same
corpus, reward and size of model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from harness1.config import load_config
from harness1.errors import SchemaError, UsageError, optional
from harness1.models.fetch import resolve_model
from harness1.plain import digest
from harness1.recipe.gates import Parse, StageCase, artifact, model_of
from harness1.recipe.recipe import Objective, Recipe, Space, Value, names_in, put_setting, recipe_of
from harness1.recipe.run import Event, Execute, RecipeRun, StageFailed, StageRecord, Watch, hold_folder
from harness1.records import Record
from harness1.runs.files import read_record, write_json
from harness1.runs.journal import Journal, read_line_records

if TYPE_CHECKING:
    import optuna

EXPERIENCE = Path("~/.cache/harness1/experience")
TUNING, RESULTS, SHARED = "tuning.json", "trials.jsonl", "shared"
NEAR = 0.05
"""Share of a range within which two values of a setting count as the same."""
WARM = 2
"""Trials that must have passed a look before it stops another one."""
DRAWS = 50
"""Draws for one trial, while those that come close to failed settings are put back."""
BROKEN = 3
"""Commands that may fail in a row before the tuning ends: the cause is then not the settings."""
UNDRAWABLE = (ValueError, TypeError, OverflowError)
"""What Optuna raises for settings that are not in their ranges."""
NUMBER = "number"
"""The attribute of a trial with its number here."""


class TrialResult(Record, kw_only=True):
    """What came out of one trial: all that later tunings learn from it. Without `value` and `stopped` it has begun."""

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


def divide_stages(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the stages that all trials share, and those that a searched setting reaches, in order."""
    objective = objective_of(recipe)
    ends = {objective.stage, *objective.looks}
    needed = [name for name in recipe.stages if any(name in (end, *recipe.upstream(end)) for end in ends)]
    values = recipe.search.keys() & recipe.values.keys()
    varied = {key.partition(".")[0] for key in recipe.search if key not in values}
    varied |= {name for name, stage in recipe.stages.items() if values & {*names_in(stage)}}
    own = [name for name in needed if varied & {name, *recipe.upstream(name)}]
    return [name for name in needed if name not in own], own


def trial_recipe(recipe: Recipe, settings: Mapping[str, Value], shared: Path) -> Recipe:
    """Return the recipe of one trial: the stages that its settings reach, over the folders of the shared ones."""
    tree = msgspec.to_builtins(recipe)
    for key, value in settings.items():
        put_setting(tree, key, value)
    common, own = divide_stages(recipe)
    tree["inputs"] |= {name: str(shared / name) for name in common}
    tree["stages"] = {name: tree["stages"][name] for name in own}
    return recipe_of(tree | {"search": {}, "objective": None}, recipe.title)


def is_near(one: Mapping[str, Value], other: Mapping[str, Value], search: Mapping[str, Space]) -> bool:
    """Return whether settings are equal choices and numbers within `NEAR` of their range, as it is drawn."""
    if not search.keys() <= one.keys() & other.keys():
        return False

    def is_close(space: Space, a: Value, b: Value) -> bool:
        if isinstance(a, str) or isinstance(b, str) or space.low is None or space.high is None:
            return a == b
        if not (space.low <= a <= space.high and space.low <= b <= space.high):
            return False  # one of them is from another tuning
        low, high, x, y = (math.log(each) if space.log else float(each) for each in (space.low, space.high, a, b))
        return abs(x - y) < NEAR * (high - low)

    return all(is_close(space, one[name], other[name]) for name, space in search.items())


def best_of(results: Sequence[TrialResult], *, maximize: bool) -> TrialResult | None:
    """Return the result with the best value, the first of equal ones; None if no trial ended."""
    ended = [each for each in results if each.value is not None and math.isfinite(each.value)]
    sign = -1.0 if maximize else 1.0
    return min(ended, key=lambda each: sign * (each.value or 0.0), default=None)


def tuning_subject(recipe: Recipe, shared: Path, parse: Parse) -> str:
    """Return the hash of what a tuning is about: the documents as they are indexed, the reward of the objective's
    stage, the size of the model as a power of two, the objective, and the names of the settings that are varied.
    `shared`: the folder of the shared stages, which are done."""
    objective = objective_of(recipe)
    cases = {name: StageCase(*parse(recipe.words(name, shared)), shared) for name in recipe.stages}
    corpus = sorted(artifact(shared / name) for name, case in cases.items() if case.verb == "index")
    models: list[Path] = []
    for spec in filter(None, map(model_of, cases.values())):
        if (place := Path(spec.model)).is_dir():
            models.append(place)
        elif not spec.url and not place.is_relative_to(shared):
            models.append(resolve_model(spec.model))
    size = sum(file.stat().st_size for place in models for file in place.glob("*.safetensors"))
    case = cases[objective.stage]
    reward = load_config(case.option("--config") or None, list(case.given.get("--set") or ())).reward_hash
    about = [corpus, reward, max(size, 1).bit_length()]
    return digest([*about, objective.stage, objective.metric, sorted(recipe.search)])


@dataclass
class Tuning:
    """The trials of a recipe in one folder."""

    recipe: Recipe
    out: Path
    execute: Execute
    watch: Callable[[int | None], Watch]
    """Returns who is told of a trial's stages, by its number; None: of the shared stages."""
    parse: Parse
    seed: int = 0
    experience: Path | None = None
    """The folder of what tunings learned, a file for each subject; None: nothing is read and nothing kept."""
    on_result: Callable[[TrialResult], None] = lambda result: None
    results: list[TrialResult] = field(default_factory=list)
    _begun: dict[int, TrialResult] = field(default_factory=dict)
    """All trials that this folder holds, by their numbers."""
    _waiting: list[int] = field(default_factory=list)
    """Those that were interrupted."""
    _known: Path | None = None
    """The file of earlier trials about this subject, to which other processes may append at the same time."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _broken: int = 0
    _ended: bool = False

    def run(self, trials: int, parallel: int) -> list[TrialResult]:
        """Run trials until the folder holds this many, some at the same time; return all results in order. Raises
        UsageError: the recipe has nothing to tune, or the folder holds another tuning; StageFailed: a shared stage
        failed, or commands failed again and again; MissingExtra: Optuna is not installed."""
        common, _ = divide_stages(self.recipe)
        with optional("tune"):
            import optuna
        with hold_folder(self.out, TUNING):
            self._describe()
            lines = _read_lines(self.out / RESULTS, self.recipe.search)
            self._begun, self.results = {each.number: each for each in lines}, [*filter(_has_ended, lines)]
            stages = {name: self.recipe.stages[name] for name in common}
            shared = replace(self.recipe, stages=stages, search={}, objective=None)
            RecipeRun(shared, self.out / SHARED, self.execute, self.watch(None), self.parse).run()
            if self.experience:
                subject = tuning_subject(self.recipe, self.out / SHARED, self.parse)
                self._known = self.experience / f"{subject[:16]}.jsonl"
                self._describe(subject)
                self._teach(self.results)  # those that a kill kept from it
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            study, ended = self._make_study(), {each.number for each in self.results}
            self._waiting = sorted(self._begun.keys() - ended)
            with Journal(self.out, RESULTS) as journal, ThreadPoolExecutor(parallel) as pool:
                futures = [pool.submit(self._work, study, trials, journal) for _ in range(parallel)]
                try:  # an interrupt reaches the commands of the trials, too, and ends them all
                    for future in futures:
                        future.result()
                finally:
                    self._ended = True
        return sorted(self.results, key=lambda each: each.number)

    def _work(self, study: optuna.Study, trials: int, journal: Journal) -> None:
        while not self._ended and (trial := self._next(study, trials, journal)) is not None:
            self._run_trial(study, trial, journal)

    def _next(self, study: optuna.Study, trials: int, journal: Journal) -> optuna.Trial | None:
        """Return an interrupted trial, or one with settings that have not failed; None if all are begun."""
        import optuna

        with self._lock:
            if self._waiting:
                begun = self._begun[self._waiting.pop(0)]
                study.enqueue_trial(begun.settings, user_attrs={NUMBER: begun.number})
                return study.ask(_distributions(self.recipe))
            earlier = [*self.results, *(read_results(self._known) if self._known else ())]
            failed = [each.settings for each in earlier if each.failed]
            for _ in range(DRAWS if len(self._begun) < trials else 0):
                trial = study.ask(_distributions(self.recipe))
                if not any(is_near(trial.params, each, self.recipe.search) for each in failed):
                    number = next(at for at in count() if at not in self._begun and not self._folder(at).exists())
                    self._begun[number] = TrialResult(number=number, settings=trial.params)
                    journal.write(msgspec.json.encode(self._begun[number]))
                    trial.set_user_attr(NUMBER, number)
                    return trial
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return None

    def _folder(self, number: int) -> Path:
        return self.out / f"trial-{number:04}"

    def _run_trial(self, study: optuna.Study, trial: optuna.Trial, journal: Journal) -> None:
        """Run a trial, stop it at a look where it is behind, and tell everybody who learns from it."""
        import optuna

        objective, number = objective_of(self.recipe), int(trial.user_attrs[NUMBER])
        watch, looks, took = self.watch(number), dict[str, float](), list[float]()

        def look(event: Event, stage: str, record: StageRecord) -> None:
            watch(event, stage, record)
            if event == "begins":
                return
            took.append(record.seconds)
            value = record.metrics.get(objective.looks.get(stage, ""))
            if value is None or record.status != "passed":
                return
            looks[stage] = value
            with self._lock:
                trial.report(value, [*objective.looks].index(stage))
                is_worse = event == "ends" and trial.should_prune()
            if is_worse:
                said = f"{objective.looks[stage]} of {stage} was {value:.4g}, worse than the median"
                raise optuna.TrialPruned(said)

        result = TrialResult(number=number, settings=trial.params, looks=looks)
        try:
            recipe = trial_recipe(self.recipe, trial.params, self.out / SHARED)
            state = RecipeRun(recipe, self._folder(number), self.execute, look, self.parse).run()
            metrics = state.stages[objective.stage].metrics
            if objective.metric not in metrics:
                raise UsageError(f"{objective.stage} has no metric {objective.metric}; it has {', '.join(metrics)}")
            result = replace(result, value=metrics[objective.metric])
        except optuna.TrialPruned as reason:
            result = replace(result, stopped=str(reason))
        except StageFailed as error:
            result = replace(result, stopped=str(error), failed=True)
            with self._lock:
                self._broken = self._broken + 1 if not error.record.findings else 0
                if self._broken >= BROKEN:  # the commands fail by themselves: the settings are not the cause
                    self._ended = True
                    raise
        result = replace(result, seconds=sum(took, 0.0))
        with self._lock:
            journal.write(msgspec.json.encode(result))
            self.results.append(result)
            self._teach([result])
            study.tell(trial, result.value, None if result.value is not None else optuna.trial.TrialState.PRUNED)
            self.on_result(result)

    def _teach(self, results: Sequence[TrialResult]) -> None:
        """Add results to the experience that it lacks."""
        if self._known is not None:
            with Journal(self._known.parent, self._known.name, wait=True) as experience:
                there = read_results(self._known)
                for each in results:
                    if each not in there:
                        experience.write(msgspec.json.encode(each))

    def _make_study(self) -> optuna.Study:
        """Return a study of the trials here and of what others learned, whose best settings come first."""
        import optuna

        maximize, ranges = objective_of(self.recipe).maximize, _distributions(self.recipe)
        states = optuna.trial.TrialState
        looks = [*objective_of(self.recipe).looks]
        study = optuna.create_study(
            direction="maximize" if maximize else "minimize",
            sampler=optuna.samplers.TPESampler(seed=self.seed + len(self._begun), n_startup_trials=5),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=WARM, n_min_trials=WARM),
        )
        earlier = read_results(self._known) if self._known else []
        learned = [replace(each, looks={}) for each in earlier if each.value is not None and each not in self.results]
        learned.sort(key=lambda each: each.value or 0.0, reverse=maximize)
        for each in (*learned, *self.results):
            with suppress(*UNDRAWABLE):  # its settings cannot be drawn here
                made = optuna.trial.create_trial(
                    params=each.settings,
                    distributions=ranges,
                    value=each.value,
                    state=states.PRUNED if each.value is None else states.COMPLETE,
                    intermediate_values={looks.index(name): value for name, value in each.looks.items()},
                )
                study.add_trial(made)
        if not self._begun and (best := study.get_trials()[:1]):
            study.enqueue_trial(best[0].params)
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


def read_tuning(out: Path) -> TuningCard | None:
    """Return the card of a tuning's folder, or None if it has none; raise SchemaError if it is damaged."""
    return read_record(out / TUNING, TuningCard, "the card of a tuning")


def read_results(file: Path, search: Mapping[str, Space] | None = None) -> list[TrialResult]:
    """Return trials as they ended; SchemaError if one is damaged, or has other settings than `search`."""
    return [*filter(_has_ended, _read_lines(file, search))]


def _read_lines(file: Path, search: Mapping[str, Space] | None = None) -> list[TrialResult]:
    trials = list(read_line_records(file, TrialResult, "the result of a trial")) if file.is_file() else []
    for tried in (each.settings for each in trials):
        if search is not None and not (
            tried.keys() == search.keys() and all(search[name].holds(value) for name, value in tried.items())
        ):
            raise SchemaError(f"{file}: {msgspec.json.encode(tried).decode()} are no settings of this tuning")
    return trials


def _has_ended(trial: TrialResult) -> bool:
    return trial.value is not None or trial.stopped != ""


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
