"""Kill a recipe at random moments, and compare what it makes with what the same recipe makes undisturbed.

Each seed is run twice: once to its end, and once with `kill -9` at random moments before it is started again. All
artifacts must have the same hash, and since nothing is wrong with any of these runs, no gate may fail. Episodes are
sampled one at a time, and not while the model trains: rows that arrive together are decoded together, and the last bit
of a float32 depends on that.

    python benchmarks/recipe_kills.py FOLDER [--recipe tiny] [--set A=VALUE]... [--seeds 5] [--kills 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.recipe.journal import Journal, read_journal

TOY = (
    *("documents=200", "samples=1", "epochs=8", "checked=20", "batches=2", "tasks=10"),
    *("rl.gates.progress=false", "compare.gates.better=false"),
)
"""The sizes of `tiny` that `scripts/tiny.sh --toy` takes."""
ONE_BY_ONE = (
    "rl.rl.groups=4",
    "rl.machine.model.rows=1",
    "rl.rl.staleness=0",
    "eval-sft.machine.model.rows=1",
    "eval-rl.machine.model.rows=1",
)


def main() -> None:
    """Run, kill, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="default: the sizes of --toy")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    draw, found = random.Random(0), []
    for seed in range(asked.seeds):
        kills = asked.kills // asked.seeds + (seed < asked.kills % asked.seeds)
        found.append(
            compared(
                asked.folder, asked.recipe, [*(asked.changes or (*TOY, *ONE_BY_ONE)), f"seed={seed}"], seed, kills, draw
            )
        )
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    report = {
        "runs": found,
        "kills": sum(each["kills"] for each in found),
        "equal": all(each["equal"] for each in found),
        "false_alarms": sum(each["false_alarms"] for each in found),
    }
    print(json.dumps(report) if asked.json else table(report))


def compared(
    folder: Path, recipe: str, changes: Sequence[str], seed: int, kills: int, draw: random.Random
) -> dict[str, Any]:
    """Run one seed undisturbed and with kills; return how they compare."""
    calm, cut, work = folder / f"{seed}-calm", folder / f"{seed}-killed", folder / "work"
    began = time.monotonic()
    command(recipe, changes, work).wait()
    seconds = time.monotonic() - began
    work.rename(calm)  # both run in one place, because pages and comparisons name their folders
    killed_in = []
    for _ in range(kills):
        process = command(recipe, changes, work)
        try:
            process.wait(draw.uniform(1.0, 2 * seconds / (kills + 1)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            journal = read_journal(work)
            running = [name for name, each in journal.stages.items() if each.status == "running"] if journal else []
            killed_in.append(running[0] if running else "between stages")
    command(recipe, changes, work).wait()
    work.rename(cut)
    one, other = (read_journal(each) for each in (calm, cut))
    records = [record for run in (one, other) if run for record in run.stages.values()]
    findings = [each for record in records for each in record.findings]
    return {
        "seed": seed,
        "seconds": seconds,
        "kills": len(killed_in),
        "killed_in": killed_in,
        "equal": artifacts(one) == artifacts(other),
        "differing": sorted({*artifacts(one).items()} ^ {*artifacts(other).items()}),
        "false_alarms": sum(not each.passed for each in findings),
        "gates": len(findings),
    }


def command(recipe: str, changes: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """Start a recipe."""
    settings = [word for change in changes for word in ("--set", change)]
    words = [sys.executable, "-m", "harness1", "recipe", "run", recipe, "--out", str(out), "--json", *settings]
    with (out.parent / f"{out.name}.log").open("ab") as log:
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log)


def artifacts(journal: Journal | None) -> dict[str, str]:
    """Return the hash of what each stage made; a stage that did not pass has its status instead."""
    stages = journal.stages.items() if journal else ()
    return {name: each.artifact if each.status == "passed" else each.status for name, each in stages}


def table(report: dict[str, Any]) -> str:
    """Return the report as lines."""
    lines = []
    for each in report["runs"]:
        where = ", ".join(each["killed_in"])
        lines.append(f"seed {each['seed']}: {each['kills']} kills ({where}), equal: {each['equal']}")
    lines.append(f"{report['kills']} kills, equal: {report['equal']}, false alarms: {report['false_alarms']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
