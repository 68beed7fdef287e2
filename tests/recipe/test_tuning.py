"""Trials of a recipe's settings: what they share, when they stop, how they go on, and what the next tuning learns."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from harness1.cli.recipe import parse_command
from harness1.errors import UsageError
from harness1.models.checkpoint import Checkpoint
from harness1.recipe.gates import GATES, StageCase
from harness1.recipe.recipe import Objective, Recipe, Space, load_recipe, recipe_of
from harness1.recipe.run import StageFailed
from harness1.recipe.tuning import (
    RESULTS,
    TrialResult,
    Tuning,
    best_of,
    divide_stages,
    is_near,
    read_results,
    trial_recipe,
    tuning_subject,
)
from harness1.runs.files import write_json
from harness1.runs.journal import Journal
from tests.cli.commands import command_in_process

SEARCH = {"rate": Space(low=1e-4, high=1e-2, log=True), "samples": Space(choices=(4, 8))}
SFT_BEST, RL_BEST = 4e-3, 3e-4
"""The best rates of both trainings."""


def tiny(**changes: Any) -> Recipe:
    """The recipe without gates, which read real artifacts."""
    recipe = load_recipe("tiny", [f"{key}={value}" for key, value in changes.items()])
    quiet: dict[str, float | bool] = dict.fromkeys(GATES, False)
    return replace(recipe, stages={name: replace(stage, gates=quiet) for name, stage in recipe.stages.items()})


class Simulation:
    """Commands that leave the metrics that their settings earn, counted by the folder of their stage."""

    def __init__(self, interrupt_at: str = "") -> None:
        self.ran, self.interrupt_at = list[str](), interrupt_at

    def __call__(self, words: Sequence[str], log: Path, processes: int = 1) -> int:
        place = "/".join(log.parts[-3:-2]) + "/" + log.stem
        if place == self.interrupt_at:
            raise KeyboardInterrupt
        self.ran.append(place)
        case = StageCase(*parse_command(words), Path())
        out = Path(case.option("--out"))
        out.mkdir(parents=True, exist_ok=True)
        settings = dict(word.partition("=")[::2] for word in words)
        rate, same = float(settings.get("train.rate", 0.0)), [word for word in words if "/" not in word]
        noise = random.Random(" ".join([out.parent.name, *same])).gauss(0.0, 0.02)
        if case.verb == "sft train":
            write_checkpoint(out, {"valid": hill(rate, SFT_BEST) + noise, "true": hill(rate, SFT_BEST)})
        elif case.verb == "rl train":
            start = json.loads((Path(case.option("--model").removeprefix("hf:")) / "config.json").read_text())["true"]
            earned = 2.0 * start + hill(rate, RL_BEST) * (1.1 if settings["rl.samples"] == "8" else 1.0)
            write_checkpoint(out, {"reward": earned + noise})
        else:
            (out / "made.txt").write_text(case.verb)
        return 0


def hill(rate: float, best: float) -> float:
    """A value of at most 1 that falls off with the distance of a rate from the best one, in factors of e."""
    return math.exp(-0.5 * (math.log(max(rate, 1e-12) / best) / 0.7) ** 2)


def write_checkpoint(out: Path, metrics: dict[str, float]) -> None:
    card = Checkpoint(format="f", counter="c", env={}, env_hash="e", base="b", metrics=metrics)
    write_json(out / "checkpoint.json", card)
    (out / "config.json").write_text(json.dumps(metrics))


def tuning(out: Path, execute: Any, recipe: Recipe | None = None, kept: Path | None = None, seed: int = 0) -> Tuning:
    return Tuning(recipe or tiny(), out, execute, lambda trial: lambda *_: None, parse_command, seed, kept)


def test_what_no_setting_reaches_is_shared_and_the_rest_is_each_trials_own() -> None:
    recipe = load_recipe("tiny")
    assert divide_stages(recipe) == (["world", "index", "model", "teacher", "rows"], ["sft", "rl"])
    trial = trial_recipe(recipe, {"sft.train.rate": 0.005, "rl.rl.samples": 4}, Path("/t/shared"))
    assert [*trial.stages] == ["sft", "rl"]
    words = trial.words("sft", Path("/t/trial-0000"))
    assert words[:4] == ("sft", "train", "/t/shared/rows", "--model")
    assert "train.rate=0.005" in words
    assert "rl.samples=4" in trial.words("rl", Path("/t/trial-0000"))
    by_value = replace(recipe, search={"samples": Space(choices=(1, 2))})
    assert divide_stages(by_value) == (["world", "index", "model"], ["teacher", "rows", "sft", "rl"])


@pytest.mark.parametrize(
    ("other", "near"),
    [
        ({"rate": 1.1e-3, "samples": 4}, True),
        ({"rate": 2e-3, "samples": 4}, False),
        ({"rate": 1e-3, "samples": 8}, False),
        ({"rate": 1e-3}, False),
    ],
)
def test_settings_are_near_on_the_scale_on_which_they_are_drawn(other: dict[str, Any], near: bool) -> None:
    assert is_near({"rate": 1e-3, "samples": 4}, other, SEARCH) is near


def test_the_best_trial_is_the_first_with_the_best_value() -> None:
    results = [TrialResult(number=at, settings={}, value=value) for at, value in enumerate([1.0, None, 3.0, 3.0, 0.5])]
    assert [best_of(results, maximize=most).number for most in (True, False)] == [2, 4]
    assert best_of(results[1:2], maximize=True) is None


def test_the_shared_stages_run_once_and_a_finished_tuning_runs_nothing(tmp_path: Path) -> None:
    commands = Simulation()
    results = tuning(tmp_path / "t", commands).run(trials=4, parallel=2)
    assert [each.number for each in results] == [0, 1, 2, 3]
    assert sum(place.startswith("shared/") for place in commands.ran) == 5
    assert {place for place in commands.ran if place.startswith("trial-0001")} >= {"trial-0001/sft"}
    again = Simulation()
    assert tuning(tmp_path / "t", again).run(trials=4, parallel=2) == results
    assert again.ran == []
    assert len(tuning(tmp_path / "t", again).run(trials=5, parallel=1)) == 5


def test_a_trial_that_looks_worse_is_stopped_there(tmp_path: Path) -> None:
    results = tuning(tmp_path / "t", Simulation()).run(trials=12, parallel=1)
    stopped = [each for each in results if each.value is None]
    assert stopped
    assert all("valid of sft was" in each.stopped and not each.failed for each in stopped)
    assert not any((tmp_path / "t" / f"trial-{each.number:04}" / "rl").exists() for each in stopped)


def test_after_an_interrupt_the_trial_at_work_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tuning(tmp_path / "t", Simulation("trial-0000/sft")).run(trials=3, parallel=1)
    with pytest.raises(KeyboardInterrupt):
        tuning(tmp_path / "t", Simulation("trial-0001/rl")).run(trials=3, parallel=1)
    first = read_results(tmp_path / "t" / RESULTS)
    assert [each.number for each in first] == [0]
    again = Simulation()
    results = tuning(tmp_path / "t", again).run(trials=3, parallel=1)
    assert [each.number for each in results] == [0, 1, 2]
    assert "trial-0001/sft" not in again.ran
    assert "trial-0001/rl" in again.ran


@pytest.mark.parametrize("lost", [0, 1, 40, None], ids=["after the line", "its end", "in the line", "before the line"])
def test_a_kill_at_the_end_of_a_trial_loses_none_and_is_in_nobodys_way(tmp_path: Path, lost: int | None) -> None:
    """Bytes of the last line that the kill kept from the journal; that of the experience is not yet written."""
    tuning(tmp_path / "t", Simulation(), kept=tmp_path / "kept").run(trials=3, parallel=1)
    [known] = (tmp_path / "kept").iterdir()
    for file, missing in ((tmp_path / "t" / RESULTS, lost), (known, None)):
        whole = file.read_bytes()
        last = len(whole.splitlines(keepends=True)[-1])
        file.write_bytes(whole[: len(whole) - (last if missing is None else missing)])
    again = Simulation()
    results = tuning(tmp_path / "t", again, kept=tmp_path / "kept").run(trials=4, parallel=1)
    assert [each.number for each in results] == [0, 1, 2, 3]
    assert "trial-0002/sft" not in again.ran, "it had passed"
    assert len({str(each.settings) for each in results}) == 4
    assert sorted(read_results(known), key=lambda each: each.number) == results
    with known.open("ab") as file:
        file.write(b'{"number":9,"settin')
    assert len(tuning(tmp_path / "u", Simulation(), kept=tmp_path / "kept").run(trials=1, parallel=1)) == 1
    assert len(read_results(known)) == 5


@pytest.mark.parametrize(
    ("changes", "ended"),
    [({"sft.train.rate": "fast"}, {}), ({"sft.train.rate": -1.0}, {}), ({"rl.rl.samples": 5}, {"value": 1.0})],
)
def test_a_trial_that_cannot_be_drawn_is_told_in_a_line(
    tmp_path: Path, changes: dict[str, Any], ended: dict[str, float]
) -> None:
    (first,) = tuning(tmp_path / "t", Simulation()).run(trials=1, parallel=1)
    with Journal(tmp_path / "t", RESULTS) as journal:
        journal.write(json.dumps({"number": 1, "settings": first.settings | changes, **ended}).encode())
    with pytest.raises(UsageError, match=r"trials\.jsonl: {.*} are no settings of this tuning"):
        tuning(tmp_path / "t", Simulation()).run(trials=2, parallel=1)


def test_a_trial_that_fails_a_gate_is_not_repeated(tmp_path: Path) -> None:
    """The simulated training leaves no log, which its gate finds."""
    recipe = tiny()
    stages = {**recipe.stages, "sft": replace(recipe.stages["sft"], gates=recipe.stages["sft"].gates | {"finite": 0.0})}
    search = {"sft.train.epochs": Space(choices=(1, 2))}
    recipe = replace(recipe, stages=stages, search=search, objective=Objective("sft", "valid"))
    results = tuning(tmp_path / "t", Simulation(), recipe, tmp_path / "kept").run(trials=6, parallel=1)
    assert [each.failed for each in results] == [True, True]  # there are no other settings to try
    assert {each.settings["sft.train.epochs"] for each in results} == {1, 2}
    assert all("gate finite" in each.stopped for each in results)
    assert tuning(tmp_path / "u", Simulation(), recipe, tmp_path / "kept").run(trials=6, parallel=1) == []


def test_commands_that_fail_again_and_again_end_the_tuning(tmp_path: Path) -> None:
    def execute(words: Sequence[str], log: Path, processes: int) -> int:
        return 3 if "trial" in str(log) else Simulation()(words, log)

    with pytest.raises(StageFailed, match="exit code 3"):
        tuning(tmp_path / "t", execute).run(trials=9, parallel=1)
    assert len(read_results(tmp_path / "t" / RESULTS)) < 3


def test_what_was_learned_comes_first_where_it_can_be_drawn(tmp_path: Path) -> None:
    first = tuning(tmp_path / "a", Simulation(), kept=tmp_path / "kept").run(trials=8, parallel=1)
    drawn = first[0].settings
    [known] = (tmp_path / "kept").iterdir()
    changes: list[dict[str, Any]] = [{"sft.train.rate": 1.0}, {"rl.rl.samples": 5}, {"sft.train.rate": "a"}]
    for settings in ({}, *({**drawn, **each} for each in changes)):
        with Journal(known.parent, known.name) as journal:
            journal.write(msgspec.json.encode(TrialResult(number=99, settings=settings, value=9.0)))
    second = tuning(tmp_path / "b", Simulation(), kept=tmp_path / "kept", seed=9).run(trials=2, parallel=1)
    best = best_of(first, maximize=True)
    assert second[0].settings == best.settings
    assert second[1].settings != best.settings
    alone = tuning(tmp_path / "c", Simulation(), seed=9).run(trials=1, parallel=1)
    assert alone[0].settings != best.settings


def test_experience_is_of_the_same_documents_reward_and_size(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 100_000)):
        model = tmp_path / name
        model.mkdir()
        (model / "model.safetensors").write_bytes(bytes(size))
    shared = tmp_path / "shared"
    for text in ("one", "two"):
        (shared / text / "index").mkdir(parents=True)
        (shared / text / "index" / "made.txt").write_text(text)

    def subject(model: str = "small", corpus: str = "one", change: str = "rl.rl.batches=3") -> str:
        recipe = load_recipe("own-corpus", [change], ["documents=docs", f"model={tmp_path / model}"])
        return tuning_subject(recipe, shared / corpus, parse_command)

    assert subject() == subject(change="rl.rl.batches=9")
    assert len({subject(), subject("large"), subject(corpus="two"), subject(change="rl.reward.clutter=0.2")}) == 4


def test_a_recipe_without_an_objective_and_a_folder_of_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \[search\] or no \[objective\]"):
        tuning(tmp_path / "t", Simulation(), recipe_of({"title": "t", "stages": {}}, "t")).run(1, 1)
    tuning(tmp_path / "t", Simulation()).run(trials=1, parallel=1)
    with pytest.raises(UsageError, match="t holds trials of another recipe"):
        tuning(tmp_path / "t", Simulation(), tiny(documents=50)).run(trials=1, parallel=1)


def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    recipe = replace(tiny(), objective=Objective("rl", "profit"))
    with pytest.raises(UsageError, match="rl has no metric profit; it has reward"):
        tuning(tmp_path / "t", Simulation(), recipe).run(trials=1, parallel=1)


def test_the_table_shows_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tuning(tmp_path / "t", Simulation()).run(trials=8, parallel=1)
    harness1 = command_in_process(monkeypatch, capsys)
    shown = harness1("tune", "show", str(tmp_path / "t"))
    assert shown.code == 0
    assert "Best of 8 trials" in shown.out
    found = json.loads(harness1("tune", "show", str(tmp_path / "t"), "--json").out)
    assert [each["number"] for each in found["trials"]] == list(range(8))
    best = best_of(results, maximize=True)
    assert f"in trial {best.number}: --set " in shown.out
    assert harness1("tune", "show", str(tmp_path)).code == 2
