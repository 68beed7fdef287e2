"""Measure the value of training on single turns of a teacher, in the micro setting (`benchmarks/micro.py`, `learn.py`).

The start is profiled on turns of the oracle teacher. Fresh rollouts give the share of groups whose rewards differ, at
the kept turns and at as many candidates drawn at random. Then the start is trained on the kept turns, and validated on
whole held-out episodes. The result is the number of turns sampled to reach a reward, as a ratio to training on whole
episodes.

    python benchmarks/pivots.py FOLDER [--seeds N] [--episodes N] [--fresh N] [--batches N] [--whole N]
                                [--set A.B=VALUE] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.learn import learned, line, told
from benchmarks.micro import MICRO, Start, make, play
from harness1.config import Config, load_config
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.eval.statistics import bootstrap_mean
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Task
from harness1.rl.advantages import has_signal
from harness1.rl.learning import Learning, learn
from harness1.rl.local_rollouts import LocalRollouts, open_policy_to_train, publish_to
from harness1.rl.pivots.profile import Profile, profile
from harness1.rl.pivots.rollouts import PivotRollouts
from harness1.rl.pivots.training import PivotTraining, open_training
from harness1.rl.task_stream import PlacedTask, TaskStream
from harness1.sft.teacher_run import open_runs
from harness1.training.log import VALIDATION_PREFIX, read_log

if TYPE_CHECKING:
    from harness1.models.adapters import Weights

Curve = list[tuple[float, float]]
"""Turns sampled so far, and the reward on held-out tasks."""
RESAMPLES = 2000
TEACHER = "pivot-teacher"


class TurnsAndEpisodes:
    """Rollouts that train on single turns and are watched on whole episodes."""

    def __init__(self, turns: PivotRollouts, episodes: LocalRollouts) -> None:
        self._turns, self._episodes = turns, episodes

    async def run(
        self, jobs: Iterable[EpisodeJob] | AsyncIterable[EpisodeJob], on_episode: Callable[[Episode], None]
    ) -> None:
        """Play validation jobs, which come as a list, or training jobs, which come one by one."""
        played = self._episodes if isinstance(jobs, list) else self._turns
        await played.run(jobs, on_episode)

    async def publish(self, state: Weights, version: int) -> None:
        """Publish weights to the policy that both share."""
        await self._episodes.publish(state, version)


def main() -> None:
    """Profile, sample anew, train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=300, help="of the teacher, whose turns are profiled")
    parser.add_argument("--fresh", type=int, default=300, help="turns of each kind that are sampled anew")
    parser.add_argument("--batches", type=int, default=40, help="of single turns")
    parser.add_argument("--whole", type=int, default=20, help="batches of whole episodes")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    start = Start(asked.folder, load_config(MICRO, asked.overrides))
    make(start)
    counts = profiled(start, asked.episodes)
    report: dict[str, Any] = {"profile": counts["fates"]["all"], "signal": signal(start, asked.fresh)}
    print(line("signal", report["signal"]), file=sys.stderr, flush=True)
    seeds, samples = range(asked.seeds), start.config.rl.samples
    whole = [curve(whole_episodes(start, seed, asked.whole), samples) for seed in seeds]
    single = [curve(trained(start, seed, asked.batches), samples) for seed in seeds]
    report |= {"turns": cost(whole, single), "ratio": interval(whole, single), "whole": whole, "single": single}
    print(json.dumps(report) if asked.json else text(report))


def policy_of(start: Start, config: Config) -> LanguageModelPolicy:
    """Open the start as a policy to sample from."""
    return open_policy_to_train(f"hf:{start.folder / 'start'}", config)


def profiled(start: Start, episodes: int) -> dict[str, Any]:
    """Profile the teacher's turns and return the counts."""
    play(start, "silent:oracle-teacher", TEACHER, start.tasks("train", episodes), student="model")
    run = open_runs([start.folder / TEACHER], rerendered=True)[0]
    policy = policy_of(start, start.config)
    return profile(Profile(run, policy, policy.name, start.config), start.folder / "pivots")


def opened(start: Start, policy: LanguageModelPolicy, *, every: bool = False) -> PivotTraining:
    """Open the training on single turns."""
    base = start.folder / "start"

    async def publish(state: Weights, version: int) -> None:
        await publish_to(policy.model, state, version, base, start.folder / "weights")

    return open_training(start.folder / "pivots", policy, start.config, publish, every=every)


def signal(start: Start, turns: int) -> dict[str, Any]:
    """Return the shares of groups with signal, on fresh rollouts at kept turns and at candidates drawn at random."""
    found: dict[str, Any] = {}
    for name, every in (("kept", False), ("random", True)):
        policy = policy_of(start, start.config)
        training = opened(start, policy, every=every)
        tasks = list(training.train)
        chosen = Random(f"fresh/{name}").sample(tasks, min(turns, len(tasks)))
        flags = asyncio.run(fresh(training.rollouts, chosen, start.config))
        each = bootstrap_mean(flags, RESAMPLES)
        found[name] = {"mean": each.mean, "low": each.low, "high": each.high}
        found[f"{name}_turns"] = len(chosen)
    found["ratio"] = found["kept"]["mean"] / max(found["random"]["mean"], 1e-9)
    return found


async def fresh(rollouts: PivotRollouts, tasks: Sequence[Task], config: Config) -> list[float]:
    """Return for each turn if a new group of samples has signal. The seeds differ from those of the profile."""
    stream = TaskStream([PlacedTask(task) for task in tasks], config.rl.samples, seed=config.rl.seed + 10_000)
    jobs = [job for index in range(len(tasks)) for job in stream.jobs(index)]
    groups: dict[str, list[float]] = {}

    def keep(episode: Episode) -> None:
        if episode.reward is not None:
            groups.setdefault(episode.group_id or "", []).append(episode.reward.total)

    await rollouts.run(jobs, keep)
    return [float(has_signal(rewards)) for rewards in groups.values()]


def looking(start: Start, batches: int) -> Config:
    """Return the settings of a short training run with ten validations."""
    rl = msgspec.structs.replace(start.config.rl, batches=batches)
    watch = msgspec.structs.replace(start.config.train.watch, every=max(1, batches // 10))
    return msgspec.structs.replace(start.config, rl=rl, train=msgspec.structs.replace(start.config.train, watch=watch))


def whole_episodes(start: Start, seed: int, batches: int) -> Path:
    """Train the start on whole episodes and return the folder of the checkpoint."""
    return learned(replace(start, config=looking(start, batches)), seed, name=f"learned-whole-{seed}")


def trained(start: Start, seed: int, batches: int) -> Path:
    """Train the start on the kept turns and return the folder of the checkpoint."""
    base, out = start.folder / "start", start.folder / f"learned-pivots-{seed}"
    config = looking(start, batches)
    config = msgspec.structs.replace(config, rl=msgspec.structs.replace(config.rl, seed=seed))
    policy = policy_of(start, config)
    training = opened(start, policy)
    setups = [EpisodeSetup(config, str(start.folder / "index"), policy.name)]
    players = TurnsAndEpisodes(training.rollouts, LocalRollouts(setups, policy, base, out / "weights"))
    held_out = [PlacedTask(task) for task in start.tasks("dev", config.train.watch.tasks)]
    work = Learning([PlacedTask(task) for task in training.train], held_out, setups, base, out, config)
    if not work.is_done(policy.hash):
        learn(work, nullcontext(players), policy.counter, policy.hash, told)
    return out


def curve(out: Path, samples: int) -> Curve:
    """Return the turns sampled so far, including those of dropped groups, and the reward on held-out tasks."""
    points, turns, seen = [], 0.0, 0.0
    for each in read_log(out):
        if "loss" in each:
            turns += (each["groups/produced"] - seen) * samples * each["turns"]
            seen = each["groups/produced"]
        elif f"{VALIDATION_PREFIX}reward" in each:
            points.append((turns, each[f"{VALIDATION_PREFIX}reward"]))
    return points


def cost(whole: Sequence[Curve], single: Sequence[Curve]) -> dict[str, float]:
    """Return the turns sampled to reach a level that both ways reach: three quarters of the way from the start to the
    lower of the two best rewards. Curves are means over seeds, made monotone; all begin at the mean of the start.

    Args:
        whole: a curve for each seed, all with the same number of validations.
        single: curves of training on single turns.
    """
    begin = fmean(curve[0][1] for curve in (*whole, *single))
    curves = [rising(mean_curve(each), begin) for each in (whole, single)]
    level = begin + 0.75 * (min(curve[-1][1] for curve in curves) - begin)
    turns = [reached(curve, level) for curve in curves]
    return {
        "level": level,
        "turns_of_episodes": turns[0],
        "single_turns": turns[1],
        "best_of_episodes": curves[0][-1][1],
        "best_of_single_turns": curves[1][-1][1],
        "ratio": turns[1] / max(turns[0], 1.0),
    }


def interval(whole: Sequence[Curve], single: Sequence[Curve]) -> dict[str, float]:
    """Return the ratio, and its 95 % interval over resampled seeds of both ways."""
    rng = Random(0)
    drawn = sorted(
        cost(rng.choices(whole, k=len(whole)), rng.choices(single, k=len(single)))["ratio"] for _ in range(RESAMPLES)
    )
    edge = RESAMPLES // 40
    return {"mean": cost(whole, single)["ratio"], "low": drawn[edge], "high": drawn[-1 - edge]}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves at each validation."""
    return [
        (fmean(turns), fmean(values))
        for turns, values in (zip(*look, strict=True) for look in zip(*curves, strict=True))
    ]


def rising(curve: Curve, begin: float) -> Curve:
    """Return the nearest curve that never falls, from a known beginning (isotonic regression by pooling neighbours)."""
    pools: list[list[float]] = []
    for _, value in curve[1:]:
        pools.append([max(value, begin)])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    values = [begin, *(fmean(pool) for pool in pools for _ in pool)]
    return [(turns, value) for (turns, _), value in zip(curve, values, strict=True)]


def reached(curve: Curve, level: float) -> float:
    """Return the turns at which a rising curve reaches a level, interpolated between two validations."""
    at = next(place for place, (_, value) in enumerate(curve) if value >= level)
    (turns, value), (before, low) = curve[at], curve[max(0, at - 1)]
    return turns if value <= low else before + (turns - before) * (level - low) / (value - low)


def text(report: Mapping[str, Any]) -> str:
    """Return the report as lines."""
    ends = [line("turns", report["turns"]), line("against those of whole episodes", {"ratio": report["ratio"]})]
    return "\n".join([line("profile", report["profile"]), line("signal", report["signal"]), *ends])


if __name__ == "__main__":
    main()
