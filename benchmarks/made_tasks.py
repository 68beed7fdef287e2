"""Measure what made tasks are worth: a small model that learned from a teacher in a synthetic world, beside the same
one that also learned from the teacher on tasks made from the documents of a real set. Both answer the real questions.

Both begin with the same random weights and take the same number of steps of equally many rows, drawn at random. No made
task asks what a real question asks, or has a document of its gold. The difference in curated recall comes with a 95 %
bootstrap interval over the questions. Choices are made on `--split train`; `test` is for the number that is reported.

    python benchmarks/made_tasks.py $DATA/hotpotqa FOLDER [--split train] [--steps N] [--made N] [--limit N] [--json]

FOLDER gets the world, the tasks, the index, the episodes, the rows and both checkpoints; finished work is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from benchmarks.micro import MICRO, Start, make_model, make_world, told
from harness1.config import Config, load_config
from harness1.data.leaks import EvaluationSet, Leaks, gold_set
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.eval.statistics import bootstrap_mean
from harness1.records import Task
from harness1.retrieval.index.build import build_index
from harness1.reward.outcome import outcome
from harness1.runs.store import read_episodes
from harness1.sft.build import Build, build
from harness1.sft.fine_tuning import FineTuning, fine_tune
from harness1.tasks.writing import write_tasks

TEACHER = "silent:oracle-teacher"
NEAR = 0.8
"""Similarity of the words of a made task and a real question above which the task is left out."""
SAMPLES = 2
"""Episodes of the teacher on each task."""
RESAMPLES = 10_000
ARMS: Mapping[str, Sequence[str]] = {"world": ("world",), "world+made": ("world", "made")}
"""The episodes that each of the two models learns from."""


def main() -> None:
    """Train both models, let them answer, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the real set, whose documents tasks are made from")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", default="train", help="the real questions")
    parser.add_argument("--limit", type=int, default=None, help="real questions, of the split")
    parser.add_argument("--made", type=int, default=1500, help="tasks to make; eight of ten are for training")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", type=int, default=Start.size, help="documents of the world")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    began = time.perf_counter()
    start = Start(asked.folder, load_config(MICRO, asked.overrides), size=asked.size)
    real = open_source(asked.data)
    made = prepared(start, real, asked.made)
    questions = real.tasks(asked.split)[: asked.limit]
    recalls = {arm: answered(start, arm, real, questions, asked.steps) for arm in ARMS}
    gain = bootstrap_mean([b - a for a, b in zip(recalls["world"], recalls["world+made"], strict=True)], RESAMPLES)
    report = {
        "questions": len(questions),
        "split": asked.split,
        "steps": asked.steps,
        "made": made,
        "recall": {arm: fmean(values) for arm, values in recalls.items()},
        "gain": {"mean": gain.mean, "low": gain.low, "high": gain.high},
        "bounds": bounds(start, real, questions),
        "seconds": time.perf_counter() - began,
    }
    print(json.dumps(report) if asked.json else text(report))


def prepared(start: Start, real: Source, count: int) -> dict[str, int]:
    """Make the world, the index of the real documents, the tasks, the model and the teacher's episodes; return how many
    tasks were made, and how many are left."""
    make_world(start)
    index = start.folder / "real-index"
    build_index(real.documents(), index, start.config.index)
    write_tasks(real, str(index), start.folder / "made", start.config, count=count, seed=0)
    make_model(start, (f"{document.title}\n{document.text}" for document in real.documents()))
    made = open_source(str(start.folder / "made"))
    every = made.tasks("train")
    left = apart(every, [(real.name, split, real.tasks(split)) for split in real.splits])
    for name, tasks in (("world", start.tasks("train")), ("made", left)):
        index_of_tasks = index if name == "made" else start.folder / "index"
        spec = str(start.folder / name)
        play(start, TEACHER, spec, tasks, index_of_tasks, start.folder / f"teacher-{name}", SAMPLES)
    return {"tasks": len(every), "left": len(left)}


def apart(tasks: Iterable[Task], sets: Sequence[tuple[str, str, Sequence[Task]]]) -> list[Task]:
    """Return the tasks that neither ask what a real question asks nor have a document of its gold."""
    leaks = Leaks(NEAR, [EvaluationSet(*each) for each in sets])
    gold = {doc_id for _, _, real in sets for task in real for doc_id in gold_set(task.gold)}
    return [
        task for task in tasks if leaks.find("", task.query, frozenset()) is None and not gold & gold_set(task.gold)
    ]


def answered(start: Start, arm: str, real: Source, questions: Sequence[Task], steps: int) -> list[float]:
    """Train a model, if that is not done, and return its curated recall of each question."""
    rows, out = start.folder / f"rows-{arm}", start.folder / f"model-{arm}-{steps}"
    runs = [start.folder / f"teacher-{name}" for name in ARMS[arm]]
    build(Build(runs, start.config.sft, start.config.data), rows)
    # As many steps for both, over however many rows.
    train = msgspec.structs.replace(start.taught, epochs=1000, max_steps=steps)
    work = FineTuning(rows, start.folder / "model", out, msgspec.structs.replace(start.config, train=train))
    if not work.is_done():
        fine_tune(work, told)
    return recalls_of(start, f"hf:{out}", real, questions, f"{questions[0].split}-{out.name}")


def recalls_of(start: Start, policy: str, real: Source, questions: Sequence[Task], name: str) -> list[float]:
    """Let a policy answer real questions, and return its curated recall of each."""
    play(start, policy, real.name, questions, start.folder / "real-index", start.folder / name)
    golds = {task.task_id: task.gold for task in questions}
    episodes = read_episodes(start.folder / name)
    found = {each.task.task_id: outcome(each, golds[each.task.task_id]).recall for each in episodes}
    return [found[task.task_id] for task in questions]


def bounds(start: Start, real: Source, questions: Sequence[Task]) -> dict[str, float]:
    """Return the mean recall of random actions and of the teacher."""
    return {
        policy: fmean(recalls_of(start, policy, real, questions, f"{questions[0].split}-{policy.rpartition(':')[2]}"))
        for policy in ("silent:random", TEACHER)
    }


def play(
    start: Start, policy: str, dataset: str, tasks: Sequence[Task], index: Path, out: Path, samples: int = 1
) -> None:
    """Play episodes into a run folder; policies without a model speak the format of the model."""
    student = "" if policy.startswith("hf:") else str(start.folder / "model")
    split = tasks[0].split
    evaluation = Evaluation(dataset, split, tasks, str(index), policy, greedy(start.config), samples, student=student)
    evaluate(evaluation, out)


def greedy(config: Config) -> Config:
    """Return a configuration in which the policy takes the likeliest token."""
    return msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, temperature=0.0))


def text(report: Mapping[str, Any]) -> str:
    """Return the report as lines."""
    gain, made = report["gain"], report["made"]
    return "\n".join(
        [
            f"{report['questions']} questions of {report['split']}, {report['steps']} steps, "
            f"{made['left']} of {made['tasks']} made tasks, {report['seconds']:.0f} s",
            *(f"{name}: {value:.3f}" for name, value in (report["bounds"] | report["recall"]).items()),
            f"gain: {gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})",
        ]
    )


if __name__ == "__main__":
    main()
