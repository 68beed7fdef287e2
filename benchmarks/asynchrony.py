"""Compare generation during training with generation in turn: the same start, tasks and number of batches.

Both learn the micro setting (`benchmarks/micro.py`, `benchmarks/learn.py`). Every model call has a simulated log-normal
latency on top of its computation, like the calls of a busy server. The script compares the episodes trained on per
minute, and the reward of the last weights on held-out tasks, as a share of the attainable range.

    python benchmarks/asynchrony.py FOLDER [--staleness N] [--latency SECONDS] [--sigma S] [--batches N]
                                    [--tasks N] [--samples N] [--seed N] [--set A.B=VALUE] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.learn import SPLIT, MakeRollouts, earned, gains, learned, line, summary
from benchmarks.micro import MICRO, Start, make
from harness1.config import load_config
from harness1.episodes.jobs import EpisodeSetup
from harness1.models.backend import Backend, Grammar, SampledOutput
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Sampling
from harness1.rl.local_rollouts import LocalRollouts, publish_to
from harness1.training.log import read_log

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


class DelayedBackend:
    """A backend with delayed answers. A call's latency depends only on its seed, so equal calls wait equally long.

    Args:
        median: the median of the latencies, in seconds.
        sigma: the standard deviation of the logarithm of the latencies.
    """

    def __init__(self, backend: Backend, median: float, sigma: float) -> None:
        self.backend, self._median, self._sigma = backend, median, sigma

    @property
    def hash(self) -> str:
        return self.backend.hash

    @property
    def version(self) -> int:
        return self.backend.version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        """Answer as the backend does, after a delay."""
        await asyncio.sleep(Random(f"{sampling.seed}/latency").lognormvariate(log(self._median), self._sigma))
        return await self.backend.generate(prompt_ids, sampling, grammar)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Answer as the backend does, without a delay."""
        await self.backend.load_weights(folder, version)

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Answer as the backend does, without a delay."""
        await self.backend.load_adapter(folder, version)


class DelayedRollouts(LocalRollouts):
    """Rollouts of a delayed backend; weights are not delayed."""

    async def publish(self, state: Weights, version: int) -> None:
        delayed: Any = self.policy.model
        await publish_to(delayed.backend, state, version, self._base, self._versions)


def main() -> None:
    """Train both ways, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--latency", type=float, default=0.5, help="median of a call, in seconds")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    plain = Start(asked.folder, load_config(MICRO, asked.overrides))
    make(plain)
    tasks = plain.tasks(SPLIT, asked.tasks)
    floor, top = (earned(plain, policy, tasks, asked.samples) for policy in ("silent:random", "silent:oracle"))
    width = fmean(top["reward"]) - fmean(floor["reward"])
    found, rewards = {}, {}
    for name, staleness in (("in turns", 0), ("asynchronous", asked.staleness)):
        # Groups generated during a validation would cost no time, so there is none before the last batch.
        own = [*asked.overrides, f"rl.staleness={staleness}", f"rl.batches={asked.batches}", "train.watch.every=0"]
        start = Start(asked.folder, load_config(MICRO, own))
        players = delayed(asked.latency, asked.sigma)
        out = learned(start, asked.seed, name=f"learned-staleness-{staleness}-{asked.seed}", players=players)
        rewards[name] = earned(start, f"hf:{out}", tasks, asked.samples)
        found[name] = summary(rewards[name], floor, width) | speed(
            out, start.config.rl.groups * start.config.rl.samples
        )
        print(line(name, found[name]), file=sys.stderr, flush=True)
    ratio = found["asynchronous"]["episodes_per_minute"] / found["in turns"]["episodes_per_minute"]
    report = {**found, "ratio": ratio, **gains(rewards["in turns"], rewards["asynchronous"], width)}
    print(json.dumps(report) if asked.json else "\n".join(line(name, each) for name, each in named(report).items()))


def delayed(median: float, sigma: float) -> MakeRollouts:
    """Return a function that makes rollouts with delayed calls."""

    def make(setups: list[EpisodeSetup], policy: LanguageModelPolicy, base: Path, versions: Path) -> DelayedRollouts:
        policy.model = DelayedBackend(policy.model, median, sigma)
        return DelayedRollouts(setups, policy, base, versions)

    return make


def speed(out: Path, episodes: int) -> dict[str, float]:
    """Return the episodes trained on per minute, over all batches, and their staleness."""
    steps = [each for each in read_log(out) if "loss" in each]
    return {
        "episodes_per_minute": 60 * episodes * len(steps) / sum(each["seconds"] for each in steps),
        "staleness": fmean(each["staleness"] for each in steps),
        "staleness_max": max(each["staleness_max"] for each in steps),
    }


def named(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parts of the report, one for each line."""
    rest = {name: value for name, value in report.items() if name not in ("in turns", "asynchronous")}
    return {"in turns": report["in turns"], "asynchronous": report["asynchronous"], "asynchronous against it": rest}


if __name__ == "__main__":
    main()
