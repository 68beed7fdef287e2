"""Make the start of reinforcement learning on a CPU: a small world, a small vocabulary, and a small model that learned
from a mediocre teacher. Then measure its reward, beside the bounds of the reward.

The folder gets `world` (a synthetic world in BEIR's layout, with only those of its questions that need few documents),
`index`, `model` (random weights with a tokenizer trained on the episodes of the teacher), `teacher`, `rows`
and `start`, the checkpoint to begin with. The same seed gives the same start, and finished work is not repeated.

    python benchmarks/micro.py FOLDER [--config micro] [--share S] [--tasks N] [--seed N] [--json]
    python benchmarks/micro.py FOLDER --only world      # harness1 index; then --only model
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from harness1.config import Config, Lora, Train, Validation, load_config
from harness1.data import beir
from harness1.data.open import open_source
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.records import Episode, Task
from harness1.retrieval.build import build_index
from harness1.reward.measures import measure_outcome
from harness1.rows.calls import calls_of, prompt_ids
from harness1.runs.journal import read_episodes
from harness1.sft.build import Build, build
from harness1.sft.train import FineTuning, fine_tune
from harness1.training.new_model import NewModel, Shape, collect_texts, draw

MICRO = "micro"
SPLITS = ("train", "dev", "test")
TOLD = 50
"""Steps between lines of progress."""


TAUGHT = Train(
    epochs=2,
    batch_rows=16,
    micro_tokens=1024,
    rate=3e-3,
    schedule="cosine",
    warmup=0.05,
    dtype="float32",
    lora=Lora(rank=0),
    save_every=0,
    watch=Validation(every=0, rows=64, turns=200),
)
"""Settings for fine-tuning the start."""


@dataclass(frozen=True)
class Start:
    """The settings of a start."""

    folder: Path
    config: Config
    seed: int = 0
    size: int = 2000
    """Documents of the world."""
    documents: int = 2
    """Maximum number of documents that a question needs."""
    share: float = 0.85
    """Share of the teacher's turns that the oracle teacher takes; the others are random."""
    samples: int = 4
    """Episodes of each training task."""
    words: int = 8192
    width: int = 128
    layers: int = 3
    heads: int = 4
    taught: Train = TAUGHT

    @property
    def dataset(self) -> str:
        return str(self.folder / "world")

    @property
    def teacher(self) -> str:
        return f"silent:mixed:{self.share:g}"

    def tasks(self, split: str, limit: int | None = None) -> list[Task]:
        """Return the first tasks of a split."""
        return open_source(self.dataset).tasks(split)[:limit]


def main() -> None:
    """Make the start, measure it, and print the measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", default=MICRO)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--share", type=float, default=Start.share)
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks to measure on")
    parser.add_argument("--size", type=int, default=Start.size, help="documents of the world")
    parser.add_argument("--only", choices=("world", "model"), help="make the dataset, or the model behind its index")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    config = load_config(asked.config, asked.overrides)
    start = Start(asked.folder, config, asked.seed, asked.size, share=asked.share)
    if asked.only:
        {"world": write_world, "model": make_model}[asked.only](start)
        return
    seconds = make(start)
    report = {"seconds": seconds, "policies": measured(start, asked.tasks)}
    print(json.dumps(report) if asked.json else table(report))


def make(start: Start) -> dict[str, float]:
    """Make the missing parts of the start; return the seconds of each part."""
    seconds: dict[str, float] = {}
    for name, part in (
        ("world", make_world),
        ("model", make_model),
        ("teacher", teach),
        ("rows", make_rows),
        ("start", train),
    ):
        began = time.perf_counter()
        part(start)
        seconds[name] = time.perf_counter() - began
    return seconds


def make_world(start: Start) -> None:
    """Make the dataset and its index."""
    write_world(start)
    build_index(open_source(start.dataset).documents(), start.folder / "index", start.config.index)


def write_world(start: Start) -> None:
    """Write a synthetic world, with only those of its questions that need few documents."""
    folder = Path(start.dataset)
    if not beir.is_beir(folder):
        world = open_source(f"world:{start.size}")
        tasks = (task for split in SPLITS for task in world.tasks(split))
        few = [task for task in tasks if task.metadata["hops"] <= start.documents]
        beir.write(folder, world.documents(), few)


def make_model(start: Start, more: Iterable[str] = ()) -> None:
    """Train the tokenizer, on further texts as well, and draw the weights."""
    folder = start.folder / "model"
    if not (folder / "config.json").exists():
        work = NewModel(
            start.dataset, str(start.folder / "index"), folder, start.config, start.teacher, seed=start.seed
        )
        texts = [*collect_texts(work, open_source(start.dataset), start.folder), *more]
        shape = Shape(start.words, start.width, start.layers, start.heads)
        draw(folder, texts, shape, start.config, start.seed)


def teach(start: Start) -> None:
    """Record episodes of the teacher on all training tasks."""
    play(start, start.teacher, "teacher", start.tasks("train"), samples=start.samples, student="model")


def make_rows(start: Start) -> None:
    """Make training rows of the teacher's episodes."""
    build(Build([start.folder / "teacher"], start.config.sft, start.config.data), start.folder / "rows")


def train(start: Start) -> None:
    """Train the checkpoint."""
    config = msgspec.structs.replace(start.config, train=start.taught)
    work = FineTuning(start.folder / "rows", start.folder / "model", start.folder / "start", config)
    if not work.is_done():
        fine_tune(work, told)


def told(step: int, steps: int, values: Mapping[str, float]) -> None:
    """Print a line at intervals during training."""
    if step % TOLD == 0 or step == steps:
        shown = " ".join(f"{name}={value:.3g}" for name, value in values.items())
        print(f"step {step}/{steps} {shown}", file=sys.stderr, flush=True)


def play(
    start: Start,
    policy: str,
    name: str,
    tasks: Sequence[Task],
    *,
    samples: int = 1,
    student: str = "",
    config: Config | None = None,
) -> list[Episode]:
    """Play episodes into a run folder with this name, in the format of the student in a given folder."""
    spoken = str(start.folder / student) if student else ""
    config = config or start.config
    evaluation = Evaluation(
        start.dataset,
        tasks[0].split,
        tasks,
        str(start.folder / "index"),
        policy,
        config,
        samples,
        start.seed,
        student=spoken,
    )
    evaluate(evaluation, start.folder / name)
    return list(read_episodes(start.folder / name))


def measured(start: Start, tasks: int) -> dict[str, dict[str, float]]:
    """Measure the bounds, the teacher and the start on the first held-out tasks."""
    dev = start.tasks("dev", tasks)
    found: dict[str, dict[str, float]] = {}
    for policy in ("silent:random", start.teacher, "silent:oracle-teacher", "silent:oracle"):
        name = f"dev-{tasks}-" + policy.removeprefix("silent:").replace(":", "-")
        found[policy] = measures(*_timed(start, policy, name, dev, student="model"), dev)
    for temperature in (1.0, 0.0):
        config = msgspec.structs.replace(
            start.config, policy=msgspec.structs.replace(start.config.policy, temperature=temperature)
        )
        played = _timed(start, f"hf:{start.folder / 'start'}", f"dev-{tasks}-start-{temperature:g}", dev, config=config)
        found[f"start at {temperature:g}"] = measures(*played, dev)
    floor, top = found["silent:random"]["reward"], found["silent:oracle"]["reward"]
    for each in found.values():
        each["of_range"] = (each["reward"] - floor) / (top - floor)
    return found


def _timed(start: Start, policy: str, name: str, tasks: Sequence[Task], **settings: Any) -> tuple[list[Episode], float]:
    began = time.perf_counter()
    played = play(start, policy, name, tasks, **settings)
    return played, time.perf_counter() - began


def measures(episodes: Sequence[Episode], seconds: float, tasks: Sequence[Task]) -> dict[str, float]:
    """Return means over episodes, or over turns for `valid`, and the largest prompt and call in tokens. `rows` counts
    the chains of turns whose prompts continue each other. Seconds are the total divided by the episodes."""
    golds = {task.task_id: task.gold for task in tasks}
    calls = [(episode, call) for episode in episodes for call in calls_of(episode)]
    valid = [
        turn.action is not None and turn.observation is not None and turn.observation.error is None
        for episode in episodes
        for turn in episode.turns
    ]
    return {
        "reward": fmean(episode.reward.total for episode in episodes if episode.reward),
        "recall": fmean(measure_outcome(episode, golds[episode.task.task_id]).recall for episode in episodes),
        "valid": fmean(valid),
        "turns": fmean(len(episode.turns) for episode in episodes),
        "set_size": fmean(len(episode.curated) for episode in episodes),
        "rows": fmean(map(_rows, episodes)),
        "prompt_max": max(len(prompt_ids(episode, call)) for episode, call in calls),
        "call_max": max(len(call.output_ids) for _, call in calls),
        "seconds": seconds / len(episodes),
    }


def _rows(episode: Episode) -> int:
    calls = list(calls_of(episode))
    known = [(*prompt_ids(episode, call), *call.output_ids) for call in calls]
    return 1 + sum(
        prompt_ids(episode, call)[: len(before)] != before for before, call in zip(known, calls[1:], strict=False)
    )


def table(report: dict[str, Any]) -> str:
    """Return the report as lines."""
    lines = ["seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())]
    for policy, values in report["policies"].items():
        lines.append(f"{policy}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
