"""Measure what it gains if rollouts and training take slots (GPUs) from each other, over the best fixed division.

    python benchmarks/multiplexing.py [--slots 1 2 4 8] [--ratios 1 2 4] [--batch-s 60 300] [--switch-s 0 5 15 30]
                                      [--staleness N] [--scaling P] [--groups N] [--moving] [--batches N]
                                      [--seeds N] [--json]

Every number is of a simulated training (`benchmarks/simulated_slots.py`) with the real producer and buffer in virtual
time, so it is the same on every machine. Four ways are compared:

- `split`: some slots always train, the others generate;
- `in turns`: all slots generate a batch, then all train on it (`machine.model.sleep`);
- `group`: all slots generate, and a fixed number of them train while there is a batch (ROLL's partial mode);
- `elastic`: slots join a step between micro-batches as soon as the rollouts do not need them, or at once.

The number of slots of a way is the best of a sweep with a seed of its own; the other seeds compare. The gain is the
rows trained on per hour over those of the better of the first two ways, with a 95 % bootstrap interval over seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.simulated_slots import Plan, Setting, simulated
from harness1.eval.statistics import bootstrap_mean

TUNING_SEED, RESAMPLES = 1_000_000, 1000
FIXED, SHARED = ("split", "in turns"), ("group", "elastic")


def plans(slots: int) -> dict[str, list[Plan]]:
    """Return the plans of each way; those that share go in steps of a quarter of the slots."""
    step = max(1, slots // 4)
    own, lent = range(0, slots, step), range(step, slots + 1, step)
    return {
        "split": [Plan(each) for each in range(1, slots)],
        "in turns": [Plan(0, slots, in_turns=True)],
        "group": [Plan(0, each) for each in lent],
        "elastic": [
            *(Plan(each, starving=True) for each in own),
            *(Plan(each, slots - each) for each in own if each),
        ],
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ratios", type=float, nargs="+", default=[1, 2, 4], help="work of generation over training")
    parser.add_argument("--batch-s", type=float, nargs="+", default=[60, 300], help="time of a batch without waits")
    parser.add_argument("--switch-s", type=float, nargs="+", default=[0, 5, 15, 30], help="time of a switch, each way")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--scaling", type=float, default=0.9, help="k slots train k ** scaling times as fast")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--moving", action="store_true", help="calls in progress move between slots at no cost")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    report = []
    for slots, ratio, batch_s in product(asked.slots, asked.ratios, asked.batch_s):
        setting = Setting(slots, ratio, batch_s, asked.scaling, 0.0, asked.staleness, asked.groups, asked.moving)
        split = way(setting, "split", asked.batches, asked.seeds) if slots > 1 else None
        for switch_s in asked.switch_s:
            row = compared(replace(setting, switch_s=switch_s), split, asked.batches, asked.seeds)
            report.append(row)
            print(line(row), file=sys.stderr, flush=True)
    found = {"batches": asked.batches, "seeds": asked.seeds, "settings": report}
    print(json.dumps(found) if asked.json else "\n".join(map(line, report)))
    return found


def compared(setting: Setting, split: dict[str, Any] | None, batches: int, seeds: int) -> dict[str, Any]:
    """Return the rates of all ways in a setting, and the gains of those that share. One slot cannot be split."""
    ways = {"split": split} if split else {}
    ways |= {name: way(setting, name, batches, seeds) for name in ("in turns", *SHARED)}
    fixed = max((name for name in FIXED if name in ways), key=lambda name: float(ways[name]["tuned"]))
    row = {"slots": setting.slots, "ratio": setting.ratio, "batch_s": setting.batch_s, "switch_s": setting.switch_s}
    for name in SHARED:
        gains = [own / other for own, other in zip(ways[name]["rates"], ways[fixed]["rates"], strict=True)]
        interval = bootstrap_mean(gains, RESAMPLES)
        ways[name]["gain"] = [interval.mean, interval.low, interval.high]
    return row | {"fixed": fixed, "ways": ways}


def way(setting: Setting, name: str, batches: int, seeds: int) -> dict[str, Any]:
    """Choose the best plan of a way, and measure it."""
    tuned = {plan: simulated(setting, plan, batches, TUNING_SEED).rows_per_hour for plan in plans(setting.slots)[name]}
    best = max(tuned, key=lambda plan: tuned[plan])
    outcomes = [simulated(setting, best, batches, seed) for seed in range(seeds)]
    return {
        "plan": str(best),
        "tuned": tuned[best],
        "rates": [each.rows_per_hour for each in outcomes],
        "staleness_max": max(each.staleness_max for each in outcomes),
        "training_share": outcomes[0].training_share,
    }


def line(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    ways = row["ways"]
    rates = "  ".join(f"{name} {sum(w['rates']) / len(w['rates']):7.0f} ({w['plan']})" for name, w in ways.items())
    gains = "  ".join("{} {:.2f} ({:.2f} to {:.2f})".format(name, *ways[name]["gain"]) for name in SHARED)
    head = f"{row['slots']:2} slots, ratio {row['ratio']:g}, {row['batch_s']:g} s, switch {row['switch_s']:g} s"
    return f"{head}: {gains}  | {rates}"


if __name__ == "__main__":
    main()
