"""Compare what the harness ranks and leads to with one search and with the script before, on test splits.

    python benchmarks/evidence_table.py $DATA/* --indexes indexes --out runs/evidence [--limit N] [--json]

Every system is played in both modes, by terms and hybrid: one search of the question (30 documents), the script as it
was when it judged by itself (`former_script.py`), the script of today, `follow-leads`, today's script without each
mechanism, and two weak policies with the mechanisms and without: one search that keeps what was populated (8
documents), and random actions. Of two systems that are compared, the larger set is cut to the smaller one's size, task
by task. Recall has a 95 % bootstrap interval over tasks, differences are paired, and a mean counts datasets equally.
The delivered sets are files below --out; those of finished systems are not played again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.former_script import FormerScript
from benchmarks.hybrid_table import MODEL, stratified
from benchmarks.systems import SINGLE, UNRANKED, signed
from harness1.config import Config, load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.eval.statistics import bootstrap_mean, paired_difference
from harness1.policy.policy import Policy
from harness1.policy.registry import open_policy
from harness1.records import Status, Task, UnitId
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import Retriever
from harness1.reward.outcome import f_beta, targets
from harness1.reward.ranking import Judged, Wanted, match_targets

MODES = ("bm25", "hybrid")
MOST, TOGETHER = 15, 16
"""Documents whose recall is compared, and episodes played at once."""
BEST = (2, 3, 5)


class System(NamedTuple):
    """A policy and the settings that it is played with."""

    policy: Callable[[], Policy]
    settings: tuple[str, ...] = ()


def _named(policy: str, *settings: str) -> System:
    return System(lambda: open_policy(policy), settings)


SYSTEMS: Mapping[str, System] = {
    "single": _named("single-shot", *SINGLE),
    "before": System(FormerScript, UNRANKED),
    "script": _named("scripted"),
    "follow-leads": _named("follow-leads"),
    "script, no rank": _named("scripted", "env.evidence.rank=false"),
    "script, no leads": _named("scripted", "env.leads.on=false"),
    "populated, before": _named("stop-at-once", *UNRANKED),
    "populated": _named("stop-at-once"),
    "random, before": _named("random", *UNRANKED),
    "random": _named("random"),
}
PAIRS = (
    ("script", "single"),
    ("script", "before"),
    ("before", "single"),
    ("follow-leads", "script"),
    ("script, no rank", "script"),
    ("script, no leads", "script"),
    ("populated", "populated, before"),
    ("random", "random, before"),
)
Sets = dict[str, list[str]]
"""By task: the units delivered, best first."""
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print; return what `--json` prints."""
    options = _options(arguments)
    report = {mode: _mode(mode, options) for mode in options.modes}
    print(json.dumps(report) if options.json else "\n\n".join(_markdown(mode, each) for mode, each in report.items()))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evidence_table", description="One search, the script, and the leads.")
    parser.add_argument("datasets", nargs="+", help="datasets with a test split")
    parser.add_argument("--indexes", type=Path, default=Path("indexes"), help="folder of their indexes")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"), help="folder of the delivered sets")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="ranking of searches")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--model", default=MODEL, help="embedding model of the indexes")
    parser.add_argument("--limit", type=int, default=0, help="first tasks of each split; 0: all")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def _mode(mode: str, options: argparse.Namespace) -> Row:
    """Return the rows of all datasets and the mean differences."""
    rows = {Path(dataset).name: dataset_row(dataset, mode, options) for dataset in options.datasets}
    pairs = next(iter(rows.values()))["differences"]
    means = {pair: stratified([row["differences"][pair].pop("tasks") for row in rows.values()]) for pair in pairs}
    return {"datasets": rows, "means": means}


def dataset_row(dataset: str, mode: str, options: argparse.Namespace) -> Row:
    """Return the measures of each system on a dataset, and the differences of the pairs."""
    source = open_source(dataset)
    index = options.indexes / source.name
    # One index serves both modes; without the hybrid one, nothing is embedded.
    dense = [f"index.dense.model={options.model}"] if "hybrid" in options.modes else []
    ensure_index(source, index, load_config(None, dense))
    tasks = source.tasks("test")[: options.limit or None]
    sets = {}
    for name in options.systems:
        config = load_config(None, [f"env.retrieval.mode={mode}", *dense, *SYSTEMS[name].settings])
        sets[name] = _sets(options.out / mode / source.name / f"{name}.json", name, tasks, str(index), config)
    pairs = [pair for pair in PAIRS if pair[0] in sets and pair[1] in sets]
    return {
        "tasks": len(tasks),
        "systems": {name: _measures(tasks, found) for name, found in sets.items()},
        "differences": {f"{one} - {two}": _difference(tasks, sets[one], sets[two]) for one, two in pairs},
    }


def _sets(file: Path, name: str, tasks: Sequence[Task], index: str, config: Config) -> Sets:
    """Return what a system delivers, from its file if it was played before with the same hashes."""
    retriever, policy = open_retriever(index, config), SYSTEMS[name].policy()
    card = [SearchEnv(config.env, retriever).hash, policy.hash, retriever.info.index_hash]
    known: Row = json.loads(file.read_text()) if file.exists() else {}
    if known.get("card") != card or not {task.task_id for task in tasks} <= known["sets"].keys():
        known = {"card": card, "sets": asyncio.run(_played(tasks, retriever, policy, config))}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known))
        print(f"{file} is done", file=sys.stderr, flush=True)
    return {task.task_id: known["sets"][task.task_id] for task in tasks}


async def _played(tasks: Sequence[Task], retriever: Retriever, policy: Policy, config: Config) -> Sets:
    places = asyncio.Semaphore(TOGETHER)

    async def one(task: Task) -> list[str]:
        async with places:
            env = SearchEnv(config.env, retriever, machine=config.machine)
            episode = await rollout(env, policy, task.public())
        assert episode.status is Status.COMPLETED, episode.error
        return [entry.unit_id for entry in episode.curated]

    return {task.task_id: each for task, each in zip(tasks, await asyncio.gather(*map(one, tasks)), strict=True)}


def _judged(task: Task, found: Sequence[str]) -> Judged:
    wanted = targets(task.task_id, task.gold, "document")
    return match_targets([UnitId(unit) for unit in found], Wanted(wanted.relevant, wanted.grades))


def _measures(tasks: Sequence[Task], sets: Sets) -> dict[str, list[float]]:
    """Return each measure with its interval."""
    every = [_judged(task, sets[task.task_id]) for task in tasks]
    values = {
        f"R@{MOST}": [each.recall(MOST) for each in every],
        "nDCG@10": [each.ndcg(10) for each in every],
        **{f"F1@{size}": [f_beta(each.precision(size), each.recall(size), 1.0) for each in every] for size in BEST},
        "size": [float(each.size) for each in every],
    }
    means = {name: bootstrap_mean(each, Config().machine.bootstrap) for name, each in values.items()}
    return {name: [mean.mean, mean.low, mean.high] for name, mean in means.items()}


def _difference(tasks: Sequence[Task], first: Sets, second: Sets) -> Row:
    """Compare two systems at equal set size, of at most 15 documents."""
    ours, theirs = {}, {}
    for task in tasks:
        one, two = first[task.task_id], second[task.task_id]
        size = min(len(one), len(two), MOST)
        ours[task.task_id] = _judged(task, one).recall(size) if size else 0.0
        theirs[task.task_id] = _judged(task, two).recall(size) if size else 0.0
    change = paired_difference(ours, theirs, Config().machine.bootstrap)
    samples = [ours[task] - theirs[task] for task in sorted(theirs)]
    return {"interval": [change.mean, change.low, change.high], "tasks": samples}


def _markdown(mode: str, report: Row) -> str:
    rows = report["datasets"]
    systems = list(next(iter(rows.values()))["systems"])
    measures = list(next(iter(rows.values()))["systems"][systems[0]])
    lines = [f"| {mode}: {', '.join(measures)} | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for dataset, row in rows.items():
        cells = [" ".join(f"{value[0]:.3f}" for value in row["systems"][name].values()) for name in systems]
        lines.append(f"| {dataset} ({row['tasks']}) | {' | '.join(cells)} |")
    pairs = list(report["means"])
    lines += ["", f"| {mode} | {' | '.join(pairs)} |", "|---" * (len(pairs) + 1) + "|"]
    for dataset, row in rows.items():
        cells = [signed(row["differences"][pair]["interval"]) for pair in pairs]
        lines.append(f"| {dataset} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| mean | {' | '.join(signed(report['means'][pair]) for pair in pairs)} |"])


if __name__ == "__main__":
    main()
