"""Compare a run with a baseline at equal size: the ranked sets of both are cut, task by task, to the smaller size.

    python benchmarks/beside.py RUN BASELINE [--json]

Prints the paired difference of curated recall, run minus baseline, with its 95 % bootstrap interval over tasks.
`harness1 compare RUN BASELINE --equal-size` shows more, with differences of the opposite sign.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness1.eval.compare.comparison import compare as compare_runs
from harness1.eval.run_view import read_run


def compare(run: Path, baseline: Path) -> dict[str, float | int | str]:
    """Return the mean curated recall of both at equal set size, and the paired difference."""
    ours = read_run(run)
    (pair,) = compare_runs([ours, read_run(baseline)], equal_size=True).others
    recall = pair.metrics["curated_recall"]
    return {
        "dataset": Path(ours.dataset).name,
        "tasks": pair.tasks,
        "size": pair.metrics["set_size"].first,
        "run": recall.first,
        "baseline": recall.second,
        "difference": 0.0 - recall.difference.mean,
        "low": 0.0 - recall.difference.high,
        "high": 0.0 - recall.difference.low,
    }


def main(arguments: list[str] | None = None) -> dict[str, float | int | str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args(arguments)
    result = compare(options.run, options.baseline)
    if options.as_json:
        print(json.dumps(result))
    else:
        interval = f"{result['difference']:+.3f} ({result['low']:+.3f} to {result['high']:+.3f})"
        print(
            f"{result['dataset']}: {result['tasks']} tasks, size {result['size']:.1f}, "
            f"run {result['run']:.3f}, baseline {result['baseline']:.3f}, difference {interval}"
        )
    return result


if __name__ == "__main__":
    main()
