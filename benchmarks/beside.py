"""A run beside a baseline at equal size: the baseline's ranked set is cut, task by task, to the size of the run's set.

    python benchmarks/beside.py RUN BASELINE [--json]

Prints the paired difference of curated recall with its 95 % bootstrap interval over tasks. Both runs must hold the
same tasks; the dataset is the one that the run folder names.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness1.data.source import open_source
from harness1.eval.statistics import paired_difference
from harness1.eval.summary import cut, task_metrics
from harness1.records import Episode
from harness1.run_folder import run_config
from harness1.stage import read_stage
from harness1.store import latest_episodes


def compare(run: Path, baseline: Path) -> dict[str, float | int | str]:
    """Mean curated recall of both at the run's set size, and the paired difference."""
    config, _ = run_config(run)
    stage = read_stage(run)
    assert stage is not None
    source = open_source(stage.inputs["dataset"])
    tasks = {task.task_id: task for task in source.tasks(stage.inputs["split"])}
    ours = by_task(run)
    shortened = [cut(episode, len(ours[task].curated)) for task, episode in by_task(baseline).items() if task in ours]
    a = task_metrics(ours.values(), tasks, config)
    b = task_metrics(shortened, tasks, config)
    recalls = [{task: values["curated_recall"] for task, values in side.items()} for side in (a, b)]
    difference = paired_difference(recalls[0], recalls[1], config.run.bootstrap)
    return {
        "dataset": source.name,
        "tasks": len(a),
        "size": sum(len(episode.curated) for episode in ours.values()) / len(ours),
        "run": sum(recalls[0].values()) / len(a),
        "baseline": sum(recalls[1].values()) / len(b),
        "difference": difference.mean,
        "low": difference.low,
        "high": difference.high,
    }


def by_task(run: Path) -> dict[str, Episode]:
    """The episodes of a run by task id."""
    return {key.task_id: episode for key, episode in latest_episodes(run).items()}


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
