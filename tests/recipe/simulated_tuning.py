"""What tuning saves, on the recipe `tiny` with simulated commands: each takes its share of the seconds of the
real one, and metrics follow from the settings by a formula with noise.

Three measures: the time of trials in parallel beside the same trials one after another; the simulated time that pruning
saves; and the trials until a tuning with experience tries settings as good, without the noise, as the best ones of the
tuning before: as a share of all trials of the first one, and of those that it needed itself.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from harness1.eval.statistics import bootstrap_mean
from harness1.models.checkpoint import Checkpoint
from harness1.recipe.gates import GATES, StageCase
from harness1.recipe.recipe import Recipe, load_recipe
from harness1.recipe.run import StageRecord
from harness1.recipe.tuning import Experience, TrialResult, Tuning, best_of
from harness1.runs.files import write_json

SECONDS = {
    "data copy": 2,
    "index": 5,
    "models new": 30,
    "sft collect": 20,
    "sft build": 2,
    "sft train": 90,
    "rl check": 60,
    "rl train": 300,
}
"""Simulated seconds of each verb: about those of `tiny` on two cores."""
SFT_BEST, RL_BEST = 4e-3, 3e-4
"""The best rates of both trainings."""


@dataclass(frozen=True)
class Simulation:
    """Commands that sleep, and leave the metrics that their settings earn."""

    second: float
    """Real seconds for each simulated one."""
    noise: float = 0.02

    def __call__(self, words: Sequence[str], log: Path, processes: int = 1) -> int:
        case = StageCase(tuple(words), Path())
        time.sleep(self.second * SECONDS.get(case.verb, 1))
        out = Path(case.option("--out"))
        out.mkdir(parents=True, exist_ok=True)
        settings = dict(word.partition("=")[::2] for word in words)
        rate, same = float(settings.get("train.rate", 0.0)), [word for word in words if "/" not in word]
        noise = random.Random(" ".join([out.parent.name, *same])).gauss(0.0, self.noise)
        if case.verb == "sft train":
            _checkpoint(out, {"valid": _hill(rate, SFT_BEST) + noise, "true": _hill(rate, SFT_BEST)})
        elif case.verb == "rl train":
            start = json.loads((Path(case.option("--model").removeprefix("hf:")) / "config.json").read_text())["true"]
            earned = true_reward(start, rate, int(settings["rl.samples"]))
            _checkpoint(out, {"reward": earned + noise})
        else:
            (out / "made.txt").write_text(case.verb)
        return 0


def true_reward(start: float, rate: float, samples: int) -> float:
    """Return the reward of a training without noise, from the share of valid actions that it begins with."""
    return 2.0 * start + _hill(rate, RL_BEST) * (1.1 if samples == 8 else 1.0)


def true_value(result: TrialResult) -> float:
    """Return the objective of a trial's settings without noise."""
    sft, rl, samples = (result.settings[name] for name in ("sft.train.rate", "rl.train.rate", "rl.rl.samples"))
    return true_reward(_hill(float(sft), SFT_BEST), float(rl), int(samples))


class Silent:
    """Says nothing of stages."""

    def begins(self, stage: str, says: str) -> None: ...
    def skipped(self, stage: str, record: StageRecord) -> None: ...
    def ended(self, stage: str, record: StageRecord) -> None: ...


def measured(folder: Path, trials: int, parallel: int, seeds: int, second: float) -> dict[str, Any]:
    """Return the three measures."""
    serial, results = tuned(folder / "serial", trials, 1, 0, second, prune=False)
    together, _ = tuned(folder / "parallel", trials, parallel, 0, second, prune=False)
    saved = []
    for seed in range(seeds):
        whole = _cost(tuned(folder / f"whole-{seed}", 2 * trials, 1, seed, 0.0, prune=False)[1])
        pruned = _cost(tuned(folder / f"pruned-{seed}", 2 * trials, 1, seed, 0.0)[1])
        saved.append(1.0 - pruned / whole)
    pairs = [_with_experience(folder / f"experience-{seed}", trials, seed) for seed in range(seeds)]
    of_all, of_needed = (bootstrap_mean(shares, 10_000) for shares in zip(*pairs, strict=True))
    return {
        "serial_seconds": serial,
        "parallel_seconds": together,
        "parallel_share": together / serial,
        "trials": len(results),
        "saved_by_pruning": fmean(saved),
        "with_experience_of_all": msgspec.structs.asdict(of_all),
        "with_experience_of_needed": msgspec.structs.asdict(of_needed),
    }


def tuned(
    out: Path, trials: int, parallel: int, seed: int, second: float, *, prune: bool = True, kept: Path | None = None
) -> tuple[float, list[TrialResult]]:
    """Run a tuning; return its seconds and its results.

    Args:
        kept: the folder of the experience; None for none.
    """
    recipe = without_gates(load_recipe("tiny"), prune=prune)
    experience = None if kept is None else lambda shared: Experience(kept, "simulated")
    began = time.monotonic()
    results = Tuning(recipe, out, Simulation(second), lambda trial: Silent(), seed, experience).run(trials, parallel)
    return time.monotonic() - began, results


def _with_experience(folder: Path, trials: int, seed: int) -> tuple[float, float]:
    """Return the trials of a second tuning until it tries settings as good as the first one's best, as shares of the
    first one's trials, and of those until its best; it counts as twice the trials if it never does."""
    _, first = tuned(folder / "first", 2 * trials, 1, seed, 0.0, kept=folder / "kept")
    best = best_of(first, maximize=True)
    assert best is not None
    _, second = tuned(folder / "second", 2 * trials, 1, seed + 1000, 0.0, kept=folder / "kept")
    reached = 1 + min((each.number for each in second if true_value(each) >= true_value(best)), default=4 * trials)
    return reached / len(first), reached / (best.number + 1)


def without_gates(recipe: Recipe, *, prune: bool) -> Recipe:
    """Return the recipe without gates, which read real artifacts, and without looks if nothing is to be pruned."""
    quiet: Mapping[str, float | bool] = dict.fromkeys(GATES, False)
    stages = {name: msgspec.structs.replace(stage, gates=dict(quiet)) for name, stage in recipe.stages.items()}
    assert recipe.objective is not None
    objective = recipe.objective if prune else msgspec.structs.replace(recipe.objective, looks={})
    return msgspec.structs.replace(recipe, stages=stages, objective=objective)


def _cost(results: Sequence[TrialResult]) -> float:
    """Return the simulated seconds of trials."""
    whole = sum(SECONDS[verb] for verb in ("sft train", "rl check", "rl train"))
    return float(sum(whole if each.value is not None else SECONDS["sft train"] for each in results))


def _hill(rate: float, best: float) -> float:
    """Return a value of at most 1 that falls off with the distance of a rate from the best one, in factors of e."""
    return math.exp(-0.5 * (math.log(max(rate, 1e-12) / best) / 0.7) ** 2)


def _checkpoint(out: Path, metrics: dict[str, float]) -> None:
    write_json(
        out / "checkpoint.json", Checkpoint(format="f", counter="c", env={}, env_hash="e", base="b", metrics=metrics)
    )
    (out / "config.json").write_text(json.dumps(metrics))
