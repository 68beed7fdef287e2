"""Compare the staged pipeline with a pool of workers without stages, over trajectories that only sleep.

    python benchmarks/stages.py [--seeds 5] [--scale 50] [--json]

128 trajectories share a model that serves 8 at a time. The pipeline has 8 slots each for INIT, RUN and POST; the pool
has 8 workers, each of which takes a trajectory through all stages. Latencies are lognormal (sigma 0.3) around those of
a profile, the same for both, and are divided by the scale. `use` is the share of the time of the 8 RUN slots that was
spent in RUN, `ratio` is the time of the pool over the time of the pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.episodes.stages import Finished, Pipeline, StageFailure, StageLimits

TRAJECTORIES, SLOTS, SIGMA = 128, 8, 0.3
PROFILES = {
    "cheap": (0.05, 1.0, 0.1),
    "slow scoring": (0.1, 1.0, 0.8),
    "slow init and scoring": (0.5, 1.0, 0.5),
}
"""Medians of INIT, RUN and POST, in units of a second over the scale."""


@dataclass(frozen=True)
class Trajectory:
    """The time of each stage of a trajectory, in seconds."""

    init: float
    run: float
    post: float


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=50.0, help="how much faster than the profiles say")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"seeds": options.seeds, "scale": options.scale, "profiles": {}}
    for name in PROFILES:
        rows = [asyncio.run(compare(name, seed, options.scale)) for seed in range(options.seeds)]
        report["profiles"][name] = {key: round(mean(row[key] for row in rows), 3) for key in rows[0]} | {
            f"lowest_{key}": round(min(row[key] for row in rows), 3) for key in ("use", "ratio")
        }
    print(json.dumps(report) if options.json else _table(report))
    return report


async def compare(profile: str, seed: int, scale: float) -> dict[str, float]:
    """Run the same trajectories through both, one after the other; seconds are those of the event loop."""
    jobs = list(trajectories(profile, seed, scale))
    clock = asyncio.get_running_loop().time
    began = clock()
    use = await staged(jobs)
    ended = clock()
    await stage_blind(jobs)
    ours, theirs = ended - began, clock() - ended
    blind_use = sum(job.run for job in jobs) / theirs / SLOTS
    return {"use": use, "blind_use": blind_use, "ratio": theirs / ours, "s": ours, "blind_s": theirs}


def trajectories(profile: str, seed: int, scale: float) -> Iterator[Trajectory]:
    """Draw the latencies of a profile."""
    generator = random.Random(seed)
    for _ in range(TRAJECTORIES):
        yield Trajectory(*(generator.lognormvariate(math.log(median), SIGMA) / scale for median in PROFILES[profile]))


async def staged(jobs: Sequence[Trajectory]) -> float:
    """Run the pipeline and return the use of its RUN slots."""

    async def init(job: Trajectory) -> Trajectory:
        await asyncio.sleep(job.init)
        return job

    async def run(job: Trajectory, keep: Callable[[Trajectory], None]) -> Trajectory:
        await asyncio.sleep(job.run)
        return job

    async def post(job: Trajectory) -> None:
        await asyncio.sleep(job.post)

    def through(job: Trajectory, outcome: Finished[None] | StageFailure) -> None:
        assert isinstance(outcome, Finished)

    limits = StageLimits(init=SLOTS, ready=SLOTS, run=SLOTS, post=SLOTS)
    return await Pipeline(limits, init, run, post, through).process(jobs)


async def stage_blind(jobs: Sequence[Trajectory]) -> None:
    """Run the pool: as many workers as RUN slots, each with one trajectory from beginning to end."""
    left = iter(jobs)

    async def worker() -> None:
        for job in left:
            for seconds in (job.init, job.run, job.post):
                await asyncio.sleep(seconds)

    await asyncio.gather(*(worker() for _ in range(SLOTS)))


def _table(report: dict[str, Any]) -> str:
    keys = ("use", "lowest_use", "blind_use", "ratio", "lowest_ratio", "s", "blind_s")
    lines = [
        f"{TRAJECTORIES} trajectories, {SLOTS} slots, means of {report['seeds']} seeds, time / {report['scale']:g}",
        f"{'profile (init, run, post)':40}" + "".join(f"{key:>14}" for key in keys),
    ]
    for name, row in report["profiles"].items():
        lines.append(f"{f'{name} {PROFILES[name]}':40}" + "".join(f"{row[key]:14.3f}" for key in keys))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
