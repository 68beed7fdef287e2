"""Test that training learns: CISPO in the smallest real environment, from a start that learned from a mediocre teacher.

Rewards are shares of the attainable range on the same held-out tasks: 0 is the reward of random legal actions, 1 is the
reward of the oracle. Each seed trains on tasks of the split `train` (its checkpoints are chosen on `dev`), and is
compared with the start task by task on the split `test`, with 95 % bootstrap intervals of the paired differences.

    python benchmarks/learn.py FOLDER [--seeds N] [--tasks N] [--samples N] [--set A.B=VALUE] [--control NAME] [--json]

FOLDER holds the start, which is made if it is not there (`benchmarks/micro.py`). Controls must not learn. Their
checkpoints are chosen as those of the seeds, the best of equally many validations: what a control
gains, selection gains by chance.
`shuffled` gives the advantages of a batch to other episodes, `prompts` trains outputs after the prompts of other turns,
and `logprobs`, which gives tokens the log probabilities of others, must be refused before the first step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import msgspec

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.micro import MICRO, Start, make, play
from harness1.config import Config, load_config
from harness1.episodes.jobs import EpisodeSetup
from harness1.errors import UsageError
from harness1.eval.statistics import bootstrap_mean
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Task
from harness1.reward.measures import measure_outcome
from harness1.rl.groups import EpisodeGroup, PlacedTask, training_rows
from harness1.rl.rollouts import LocalRollouts, Rollouts, open_policy_to_train
from harness1.rl.train import MakeRows, Training, train_policy
from harness1.rows import TrainRow
from harness1.training.log import VALIDATION_PREFIX, read_log

MakeRollouts = Callable[[list[EpisodeSetup], LanguageModelPolicy, Path, Path], Rollouts]
RESAMPLES = 2000
SPLIT = "test"


def main() -> None:
    """Train every seed, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--samples", type=int, default=4, help="episodes of each held-out task")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--control", choices=sorted(CONTROLS))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    start = Start(asked.folder, load_config(MICRO, asked.overrides))
    make(start)
    tasks = start.tasks(SPLIT, asked.tasks)
    floor, top = (earned(start, policy, tasks, asked.samples) for policy in ("silent:random", "silent:oracle"))
    before = earned(start, f"hf:{start.folder / 'start'}", tasks, asked.samples)
    width = fmean(top["reward"]) - fmean(floor["reward"])
    report: dict[str, Any] = {
        "tasks": len(tasks),
        "random": fmean(floor["reward"]),
        "oracle": fmean(top["reward"]),
        "start": summary(before, floor, width),
        "seeds": [],
    }
    print(line("start", report["start"]), file=sys.stderr, flush=True)
    for seed in range(asked.seeds):
        began = time.perf_counter()
        if asked.control == "logprobs":
            report["seeds"].append(refused(start, seed, asked.control))
            continue
        out = learned(start, seed, asked.control)
        seconds = time.perf_counter() - began
        after = earned(start, f"hf:{out}", tasks, asked.samples)
        found = summary(after, floor, width) | gains(before, after, width) | {"seconds": seconds} | validation(out)
        report["seeds"].append(found)
        print(line(f"seed {seed}", found), file=sys.stderr, flush=True)
    print(json.dumps(report) if asked.json else text(report))


def refused(start: Start, seed: int, control: str) -> dict[str, str]:
    """Return the error of a training run that must be refused.

    Raises:
        RuntimeError: the training run was not refused.
    """
    try:
        learned(start, seed, control)
    except UsageError as error:
        return {"refused": str(error)}
    raise RuntimeError(f"the control {control} was not refused")


def learned(
    start: Start,
    seed: int,
    control: str | None = None,
    name: str = "",
    players: MakeRollouts = LocalRollouts,
    base: str = "start",
) -> Path:
    """Train from `base`, a model in the folder of the start, and return the folder of the checkpoint. Finished work is
    not repeated."""
    rl = msgspec.structs.replace(start.config.rl, seed=seed)
    config = msgspec.structs.replace(start.config, rl=rl)
    model = start.folder / base
    out = start.folder / (name or f"learned-{control or 'cispo'}-{seed}")
    spec = f"hf:{model}"
    setups = [EpisodeSetup(config, str(start.folder / "index"), spec)]
    train = [PlacedTask(task) for task in start.tasks("train")]
    held_out = [PlacedTask(task) for task in start.tasks("dev", config.train.watch.tasks)]
    work = Training(train, held_out, setups, model, out, config)
    if control:
        work = replace(work, make_rows=CONTROLS[control])
    policy = open_policy_to_train(spec, config)
    if not work.is_done(policy.hash):
        playing = nullcontext(players(setups, policy, model, out / "weights"))
        train_policy(work, playing, policy.counter, policy.hash, told)
    return out


def told(batch: int, batches: int, values: Mapping[str, float]) -> None:
    """Print a line for every batch."""
    shown = ("reward", "curated_recall", "set_size", "turns", "tool_errors", "entropy", "wait_seconds", "train_seconds")
    for prefix in ("", VALIDATION_PREFIX):
        named = {name: values[prefix + name] for name in shown if prefix + name in values}
        if "reward" in named and (prefix or "loss" in values):
            said = " ".join(f"{name}={value:.3g}" for name, value in named.items())
            print(f"batch {batch}/{batches} {prefix}{said}", file=sys.stderr, flush=True)


def earned(start: Start, policy: str, tasks: Sequence[Task], samples: int) -> dict[str, list[float]]:
    """Return the reward, curated recall and F1, share of valid actions, size and turns of each task: means over its
    episodes."""
    name = f"{SPLIT}-" + (Path(policy[3:]).name if policy.startswith("hf:") else policy.replace(":", "-"))
    student = "" if policy.startswith("hf:") else "model"
    episodes = play(start, policy, name, tasks, samples=samples, student=student)
    by_task: dict[str, list[Episode]] = {task.task_id: [] for task in tasks}
    for episode in episodes:
        by_task[episode.task.task_id].append(episode)
    golds = {task.task_id: task.gold for task in tasks}
    return {
        "reward": [fmean(each.reward.total for each in own if each.reward) for own in by_task.values()],
        "recall": [fmean(measure_outcome(each, golds[name]).recall for each in own) for name, own in by_task.items()],
        "f1": [fmean(measure_outcome(each, golds[name]).f1 for each in own) for name, own in by_task.items()],
        "valid": [fmean(map(valid_share, own)) for own in by_task.values()],
        "size": [fmean(len(each.curated) for each in own) for own in by_task.values()],
        "turns": [fmean(len(each.turns) for each in own) for own in by_task.values()],
    }


def valid_share(episode: Episode) -> float:
    """Return the share of an episode's turns with an action that the environment carried out."""
    return fmean(
        turn.action is not None and turn.observation is not None and turn.observation.error is None
        for turn in episode.turns
    )


def summary(found: Mapping[str, Sequence[float]], floor: Mapping[str, Sequence[float]], width: float) -> dict[str, Any]:
    """Return means over tasks, and the reward as a share of the range."""
    means = {name: fmean(values) for name, values in found.items()}
    return means | {"of_range": (means["reward"] - fmean(floor["reward"])) / width}


def gains(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], width: float) -> dict[str, Any]:
    """Return the gains over the start with intervals: as a share of the range, and in curated recall."""
    found = {}
    for name, scale in (("reward", width), ("recall", 1.0)):
        pairs = zip(after[name], before[name], strict=True)
        each = bootstrap_mean([(late - early) / scale for late, early in pairs], RESAMPLES)
        found[f"{name}_gain"] = {"mean": each.mean, "low": each.low, "high": each.high}
    return found


def validation(out: Path) -> dict[str, float]:
    """Return the duration and the speed of a training run, from its log."""
    steps = [each for each in read_log(out) if "loss" in each]
    return {
        "batches": len(steps),
        "training_seconds": sum(each["seconds"] for each in steps),
        "waiting_seconds": sum(each["wait_seconds"] for each in steps),
        "stepping_seconds": sum(each["train_seconds"] for each in steps),
    }


def shuffled(groups: Sequence[EpisodeGroup], config: Config) -> list[TrainRow]:
    """Make rows with advantages that belong to other episodes of the batch."""
    rows = training_rows(groups, config.rl)
    by_episode = {row.episode_id: max(row.advantages or (0.0,), key=abs) for row in rows}
    values = list(by_episode.values())
    Random(len(rows)).shuffle(values)
    drawn = dict(zip(by_episode, values, strict=True))
    return [
        msgspec.structs.replace(row, advantages=tuple(drawn[row.episode_id] * mask for mask in row.loss_mask))
        for row in rows
    ]


def wrong_prompts(groups: Sequence[EpisodeGroup], config: Config) -> list[TrainRow]:
    """Put outputs after the prompts of other turns, from the second batch on: the first one must pass the gate."""
    by_turn = msgspec.structs.replace(config.rl, rows="turn")
    rows = training_rows(groups, by_turn)
    if any(each.policy_versions[0] == 0 for group in groups for each in group.episodes):
        return rows
    return [behind(other, row) for row, other in zip(rows, [*rows[1:], *rows[:1]], strict=True)]


def behind(prompt: TrainRow, output: TrainRow) -> TrainRow:
    """Put the output of one row after the prompt of another."""
    context, said = len(prompt.loss_mask) - sum(prompt.loss_mask), sum(output.loss_mask)
    return msgspec.structs.replace(
        output,
        token_ids=prompt.token_ids[:context] + output.token_ids[-said:],
        loss_mask=(0,) * context + output.loss_mask[-said:],
        rollout_logprobs=(0.0,) * context + (output.rollout_logprobs or ())[-said:],
        advantages=(0.0,) * context + (output.advantages or ())[-said:],
    )


def wrong_logprobs(groups: Sequence[EpisodeGroup], config: Config) -> list[TrainRow]:
    """Make rows with log probabilities that are one token off."""
    rows = training_rows(groups, config.rl)
    known = [
        value for row in rows for value, mask in zip(row.rollout_logprobs or (), row.loss_mask, strict=True) if mask
    ]
    moved = iter(known[1:] + known[:1])
    return [
        msgspec.structs.replace(row, rollout_logprobs=tuple(next(moved) if mask else 0.0 for mask in row.loss_mask))
        for row in rows
    ]


CONTROLS: dict[str, MakeRows] = {"shuffled": shuffled, "prompts": wrong_prompts, "logprobs": wrong_logprobs}


def line(name: str, found: Mapping[str, Any]) -> str:
    """Return one line of the report."""
    said = []
    for key, value in found.items():
        if isinstance(value, Mapping):
            said.append(f"{key} {value['mean']:+.3f} ({value['low']:+.3f} to {value['high']:+.3f})")
        else:
            said.append(f"{key} {value:.3f}")
    return f"{name}: " + ", ".join(said)


def text(report: Mapping[str, Any]) -> str:
    """Return the report as lines."""
    head = f"{report['tasks']} tasks: random {report['random']:.3f}, oracle {report['oracle']:.3f}"
    seeds = [
        f"seed {at}: refused: {each['refused']}" if "refused" in each else line(f"seed {at}", each)
        for at, each in enumerate(report["seeds"])
    ]
    return "\n".join([head, line("start", report["start"]), *seeds])


if __name__ == "__main__":
    main()
