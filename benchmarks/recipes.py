"""Run a shipped recipe at its real size, with several seeds: what each took, and what its policies earned.

    python benchmarks/recipes.py FOLDER [--recipe tiny] [--input NAME=PLACE]... [--seeds 0 1 2] [--json]

A recipe without a value `seed` is run once. Run again after an interrupt, it resumes. Seconds are of the commands of
all stages; CPU seconds of all processes, in this run alone. The exit code is 1 if a stage or a gate of any seed fails;
the recipe says which.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.eval.compare import compare
from harness1.eval.run import read_run
from harness1.recipe.recipe import load_recipe
from harness1.recipe.run import RecipeState, read_recipe_state


def main() -> None:
    """Run each seed, and print what it took and found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--input", action="append", default=[], dest="inputs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    seeded = "seed" in load_recipe(asked.recipe, complete=False).values
    seeds = [(seed, ["--set", f"seed={seed}"]) for seed in asked.seeds] if seeded else [(0, [])]
    found = [ran(asked, asked.folder / f"{asked.recipe}-{seed}", seed, words) for seed, words in seeds]
    print(json.dumps(found) if asked.json else "\n".join(map(table, found)))
    sys.exit(any(each["exit"] for each in found))


def ran(asked: argparse.Namespace, work: Path, seed: int, words: list[str]) -> dict[str, Any]:
    """Run a recipe with one seed; return its times, and the rewards and leads that its stages found."""
    before = cpu_seconds()
    command = [sys.executable, "-m", "harness1", "recipe", "run", asked.recipe, "--out", str(work)]
    command += [*words, *(word for each in asked.inputs for word in ("--input", each))]
    ended = subprocess.run(command, stdout=sys.stderr, check=False)
    used = cpu_seconds() - before
    journal = read_recipe_state(work)
    report = {"recipe": asked.recipe, "seed": seed, "exit": ended.returncode, "cpu_seconds": round(used)}
    return report | (measured(journal, work) if journal else {})


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(journal: RecipeState, work: Path) -> dict[str, Any]:
    """Return the seconds of each stage, the mean reward of each evaluation, and the lead of the first run of each
    comparison over the others: the mean, and its 95 % interval."""
    stages = {name: record for name, record in journal.stages.items() if record.status == "passed"}
    leads = {}
    for record in stages.values():
        if record.words[0] == "compare":
            runs = [read_run(Path(run)) for run in record.words[1 : record.words.index("--out")]]
            for pair in compare(runs, "reward", top=0).others:
                lead = pair.metrics["reward"].difference
                leads[Path(pair.second.folder).name] = [-lead.mean, -lead.high, -lead.low]
    return {
        "seconds": {name: round(record.seconds, 1) for name, record in stages.items()},
        "rewards": {name: each.metrics["reward"] for name, each in stages.items() if each.words[0] == "eval"},
        "leads": leads,
    }


def table(found: dict[str, Any]) -> str:
    """Return one run as lines."""
    seconds = found.get("seconds", {})
    lines = [
        f"{found['recipe']}, seed {found['seed']}: exit code {found['exit']}, {sum(seconds.values()):.0f} s,"
        f" {found['cpu_seconds']} CPU s"
    ]
    lines += [f"    {name}: reward {reward:.3f}" for name, reward in found.get("rewards", {}).items()]
    for name, (mean, low, high) in found.get("leads", {}).items():
        lines.append(f"    lead over {name}: {mean:+.3f} ({low:+.3f} to {high:+.3f})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
