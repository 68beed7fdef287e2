"""Compare what the harness ranks and leads to with one search and with the script, on test splits.

    python benchmarks/evidence_table.py $DATA/* --indexes indexes --out runs/evidence [--mode bm25] [--limit N] [--json]

Systems: one search of the question (30 documents), the scripted policy, and `follow-leads`, which searches the leads
and delivers the evidence order. Of two systems that are compared, the larger set is cut to the smaller one's size, task
by task. Recall has a 95 % bootstrap interval over tasks, differences are paired, and the mean counts datasets equally.
Every run is a folder below --out; existing runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.hybrid_table import MODEL, stratified
from harness1.config import Config, load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.eval.compare.comparison import at_equal_size
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.run_view import RunView, read_run
from harness1.eval.statistics import bootstrap_mean, paired_difference

SINGLE, SCRIPT, LEADS = "single-shot", "scripted", "follow-leads"
SETTINGS = {
    SINGLE: ["env.search.hits=30", "env.search.tokens=30000"],
    SCRIPT: [],
    LEADS: ["env.evidence.rank=true", "env.leads.on=true"],
}
PAIRS = ((LEADS, SINGLE), (LEADS, SCRIPT), (SCRIPT, SINGLE))
RECALL = "curated_recall"
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print; return what `--json` prints."""
    options = _options(arguments)
    table = {Path(dataset).name: dataset_row(dataset, options) for dataset in options.datasets}
    means = {name: stratified([row[name]["differences"] for row in table.values()]) for name in map(_named, PAIRS)}
    report = {"mode": options.mode, "datasets": table, "mean": means}
    for row in table.values():
        for name in means:
            del row[name]["differences"]
    print(json.dumps(report) if options.json else _markdown(report))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evidence_table", description="One search, the script, and the leads.")
    parser.add_argument("datasets", nargs="+", help="datasets with a test split")
    parser.add_argument("--indexes", type=Path, default=Path("indexes"), help="folder of their indexes")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"), help="folder of the runs")
    parser.add_argument("--mode", choices=("bm25", "hybrid"), default="bm25", help="ranking of searches")
    parser.add_argument("--limit", type=int, default=0, help="first tasks of each split; 0: all")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def dataset_row(dataset: str, options: argparse.Namespace) -> Row:
    """Return the recall of each system on a dataset and the differences of the pairs."""
    source = open_source(dataset)
    index = options.indexes / source.name
    dense = [f"index.dense.model={MODEL}"] if options.mode == "hybrid" else []
    ensure_index(source, index, load_config(None, dense))
    tasks = source.tasks("test")[: options.limit or None]
    runs: dict[str, RunView] = {}
    for policy, settings in SETTINGS.items():
        folder = options.out / options.mode / source.name / policy
        config = load_config(None, [f"env.retrieval.mode={options.mode}", *settings])
        metrics = ensure_run(Evaluation(dataset, "test", tasks, str(index), policy, config), folder)
        assert not metrics["failures"]["infra_error"], f"episodes failed in {folder}: run again"
        runs[policy] = read_run(folder, dataset)
    row: Row = {"tasks": len(tasks)}
    for policy, run in runs.items():
        recall = bootstrap_mean(list(_recalls(run).values()), Config().machine.bootstrap)
        size = sum(values["set_size"] for values in run.per_task.values()) / len(tasks)
        row[policy] = {"recall": [recall.mean, recall.low, recall.high], "size": size}
    return row | {_named(pair): _difference(runs[pair[0]], runs[pair[1]]) for pair in PAIRS}


def _difference(first: RunView, second: RunView) -> Row:
    """Compare two runs at equal set size."""
    first, second = at_equal_size(first, second)
    ours, theirs = _recalls(first), _recalls(second)
    change = paired_difference(ours, theirs, Config().machine.bootstrap)
    differences = [ours[task] - theirs[task] for task in sorted(theirs)]
    return {"difference": [change.mean, change.low, change.high], "differences": differences}


def _recalls(run: RunView) -> dict[str, float]:
    return {task: metrics[RECALL] for task, metrics in run.per_task.items()}


def _named(pair: tuple[str, str]) -> str:
    return f"{pair[0]} - {pair[1]}"


def _markdown(report: Mapping[str, Any]) -> str:
    pairs = list(report["mean"])
    head = [report["mode"], *SETTINGS, *pairs]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for dataset, row in report["datasets"].items():
        cells = [f"{row[policy]['recall'][0]:.3f} ({row[policy]['size']:.1f})" for policy in SETTINGS]
        cells += [_signed(row[pair]["difference"]) for pair in pairs]
        lines.append(f"| {dataset} ({row['tasks']}) | {' | '.join(cells)} |")
    lines.append(f"| mean {'| ' * len(SETTINGS)}| {' | '.join(_signed(report['mean'][pair]) for pair in pairs)} |")
    return "\n".join(lines)


def _signed(interval: Sequence[float]) -> str:
    mean, low, high = interval
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
    main()
