"""Fit the weights of a document's evidence value on splits that are no test splits, and show whether they carry over;
or, with `--confidence`, how sure it is that a document is one that the question asks for.

A policy plays the tasks of each split; the features of all units that it has found are what is fitted. Searches by
terms and hybrid ones have weights of their own; only the former are fitted on untitled copies too, which would have to
be embedded once more. The loss is that of a softmax over the units of a task (Cao et al. 2007, "Learning to rank: from
pairwise approach to listwise approach", ICML), each split weighs the same, and no weight may be negative. Every row is
printed with the weights fitted on all splits, and with those fitted without its own dataset, titled or not (`left
out`).

    python benchmarks/fit_evidence.py --data $DATA --indexes indexes [--mode hybrid] [--tasks 500] [--write FILE]

For confidences it plays questions of each dataset over its own corpus, which answers them, and questions of all others
over it, which it mostly does not: datasets on the same subjects answer some of each other's. The confidence is that of
the best delivered document, so the weights are fitted in turns with the choice of that document.

    python benchmarks/fit_evidence.py --confidence $DATA/scifact:train $TRAIN/nq_oracle:train ... [--tasks 100]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped, unused-ignore]

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.systems import MODEL
from harness1.config import Config, load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.memory.confidence import CONVINCING, Features, features
from harness1.memory.confidence import FITTED as CONFIDENCE
from harness1.memory.ranking import FEATURES, FITTED, Fitted
from harness1.policy.registry import open_policy
from harness1.records import Task, UnitId
from harness1.retrieval.corpus import Document
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import Retriever

SPLITS = (("hotpotqa", "train"), ("2wikimultihopqa", "train"), ("scifact", "train"), ("fm2", "dev"), ("wice", "dev"))
UNTITLED = SPLITS[:3]
"""Splits over documents whose titles are unique: they are played a second time without any titles, so that the weights
carry over to corpora that have none."""
SIZES = (3, 8, 15)
RIDGE = 1e-3
THRESHOLDS = (CONVINCING, 0.2, 0.3, 0.5)
CONFIDENCE_RIDGE, ROUNDS = 1e-2, 6
WITHOUT = " untitled"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """What one episode found: features [units, features], which units are gold, and how much gold there is."""

    features: Array
    gold: NDArray[np.bool_]
    asked: int

    def recall(self, weights: Array, size: int) -> float:
        """Return the share of the gold among the best `size` units."""
        best = np.argsort(-(self.features @ weights), kind="stable")[:size]
        return float(self.gold[best].sum()) / self.asked


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Fit and print; return what `--json` prints."""
    options = _options(arguments)
    if options.confidence:
        report = _confidence(options)
        print(json.dumps(report) if options.json else _confidence_table(report))
        return report
    settings = [f"env.retrieval.mode={options.mode}", "env.evidence.rank=true", "env.leads.on=true"]
    dense = [f"index.dense.model={MODEL}"] if options.mode == "hybrid" else []
    config = load_config(None, [*settings, *dense, *options.overrides])
    found = {name: asyncio.run(_play(options, name, split, config, True)) for name, split in SPLITS}
    for name, split in UNTITLED if options.mode == "bm25" else ():
        found[f"{name}{WITHOUT}"] = asyncio.run(_play(options, name, split, config, False))
    weights = fit(list(found.values()))
    now = FITTED.embeddings if options.mode == "hybrid" else FITTED.terms
    rows = [_row(name, found, weights, np.array(msgspec.structs.astuple(now))) for name in found]
    report = {
        "mode": options.mode,
        "tasks": options.tasks,
        "weights": dict(zip(FEATURES, map(float, weights), strict=True)),
        "splits": rows,
    }
    if options.write:
        _write(options.write, options.mode, weights)
    print(json.dumps(report) if options.json else _table(report))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fit_evidence", description="Fit the weights of the evidence value.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", type=Path, help="folder of the benchmarks")
    what.add_argument("--confidence", nargs="+", metavar="FOLDER:SPLIT", help="fit confidences on these splits")
    parser.add_argument("--indexes", type=Path, default=Path("indexes"), help="folder of their indexes")
    parser.add_argument("--mode", choices=("bm25", "hybrid"), default="bm25", help="ranking of searches")
    parser.add_argument(
        "--tasks", type=int, default=500, help="tasks of each split; for confidences also of all others together"
    )
    parser.add_argument("--policy", default="scripted", help="policy that plays them")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="setting, such as env.max_turns=9")
    parser.add_argument("--write", type=Path, help="file to write the weights to")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


async def _play(options: argparse.Namespace, name: str, split: str, config: Config, titled: bool) -> list[Found]:
    """Return what the episodes of a split found, without tasks of which nothing was found."""
    source = open_source(str(options.data / name))
    if not titled:
        named = source.documents
        source = replace(source, name=name + WITHOUT, documents=lambda: map(_untitled, named()), edition=WITHOUT)
    index = options.indexes / source.name.replace(" ", "-")
    ensure_index(source, index, config)
    retriever = open_retriever(str(index), config)
    tasks = source.tasks(split)[: options.tasks]
    found = [await _episode(task, retriever, options.policy, config) for task in tasks]
    return [each for each in found if len(each.features)]


def _untitled(document: Document) -> Document:
    return msgspec.structs.replace(document, title="")


async def _episode(task: Task, retriever: Retriever, policy: str, config: Config) -> Found:
    env = SearchEnv(config.env, retriever, machine=config.machine)
    await rollout(env, open_policy(policy, {}), task.public())
    memory = env.state.memory
    assert task.gold is not None
    relevant = {UnitId(doc_id) for doc_id, grade in task.gold.relevant.items() if grade > 0}
    features = memory.value.features(memory.query)[0]
    return Found(features, np.array([unit in relevant for unit in memory.value.numbers]), len(relevant))


def fit(splits: Sequence[Sequence[Found]]) -> Array:
    """Return the weights that make the gold of all tasks likeliest; each split weighs the same."""
    tasks = [(each, 1 / len(split)) for split in splits for each in split if each.gold.any() and not each.gold.all()]

    def loss(weights: Array) -> tuple[float, Array]:
        total, slope = RIDGE * float(weights @ weights), 2 * RIDGE * weights
        for each, share in tasks:
            values = each.features @ weights
            odds = np.exp(values - values.max())
            odds /= odds.sum()
            wanted = each.gold / each.gold.sum()
            total -= share * float(wanted @ np.log(odds + 1e-12))
            slope = slope + share * ((odds - wanted) @ each.features)
        return total, slope

    start = np.ones(len(FEATURES))
    fitted = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(0, None)] * len(start))
    return np.asarray(fitted.x, np.float64)


def _row(name: str, found: Mapping[str, Sequence[Found]], weights: Array, now: Array) -> dict[str, Any]:
    """Return the recall of one split by several weights, for each size."""
    others = fit([split for other, split in found.items() if _dataset(other) != _dataset(name)])
    searched = np.array([float(feature == "margin") for feature in FEATURES])
    row: dict[str, Any] = {
        "split": name,
        "seen": float(np.mean([each.gold.sum() / each.asked for each in found[name]])),
    }
    for label, each in (("searched", searched), ("now", now), ("fitted", weights), ("left_out", others)):
        row[label] = [float(np.mean([task.recall(each, size) for task in found[name]])) for size in SIZES]
    return row


def _dataset(name: str) -> str:
    return name.removesuffix(WITHOUT)


def _write(path: Path, mode: str, weights: Array) -> None:
    """Replace one of the two tables of weights in a file."""
    known = msgspec.toml.decode(path.read_bytes(), type=Fitted) if path.exists() else FITTED
    tables = msgspec.to_builtins(known)
    tables["embeddings" if mode == "hybrid" else "terms"] = dict(zip(FEATURES, weights, strict=True))
    lines = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.exists() else []
    for table, fitted in tables.items():
        lines += ["", f"[{table}]", *(f"{name} = {weight:.2f}" for name, weight in fitted.items())]
    path.write_text("\n".join(lines) + "\n")


def _table(report: Mapping[str, Any]) -> str:
    lines = [", ".join(f"{name} {weight:.2f}" for name, weight in report["weights"].items()), ""]
    lines.append(f"recall among the best {', '.join(map(str, SIZES))}")
    for row in report["splits"]:
        cells = [
            f"{label} {' '.join(f'{value:.3f}' for value in row[label])}"
            for label in ("searched", "now", "fitted", "left_out")
        ]
        lines.append(f"{row['split']:>24}  seen {row['seen']:.3f}  " + "  ".join(cells))
    return "\n".join(lines)


class Asked(NamedTuple):
    """A question: the features of what was delivered [documents, features], and whether the corpus answers it."""

    features: Array
    own: bool

    def confidence(self, weights: Array) -> float:
        return float(1 / (1 + np.exp(-(self.features @ weights).max())))


def _confidence(options: argparse.Namespace) -> dict[str, Any]:
    places = dict.fromkeys(options.confidence)
    tasks = {place: open_source(place.rpartition(":")[0]).tasks(place.rpartition(":")[2]) for place in places}
    found = {place: asyncio.run(_ask(place, tasks, options)) for place in places}
    weights, now = fit_confidence([*found.values()]), np.array(CONFIDENCE)
    rows = list[dict[str, Any]]()
    for place, asked in found.items():
        others = [each for other, each in found.items() if other != place]
        left_out = fit_confidence(others) if others else weights
        rows.append({"dataset": place, "left out": shares(asked, left_out), "now": shares(asked, now)})
    return {"weights": Features(*map(float, weights))._asdict(), "thresholds": THRESHOLDS, "datasets": rows}


async def _ask(place: str, tasks: Mapping[str, Sequence[Task]], options: argparse.Namespace) -> list[Asked]:
    config, source = load_config(None, ["env.retrieval.mode=bm25"]), open_source(place.rpartition(":")[0])
    index = options.indexes / source.name
    ensure_index(source, index, config)
    env = SearchEnv(config.env, open_retriever(str(index), config), machine=config.machine)
    rng = random.Random(source.name)
    own, others = list(tasks[place]), [task for other, each in tasks.items() if other != place for task in each]
    found = list[Asked]()
    for answered, asked in ((True, own), (False, others)):
        for task in rng.sample(asked, min(options.tasks, len(asked))):
            episode = await rollout(env, open_policy(options.policy), task.public())
            memory = env.state.memory
            table = features(memory.query, [(e.title, memory.text_of(unit)) for unit, e in memory.pool.entries.items()])
            at = {unit: number for number, unit in enumerate(memory.pool.entries)}
            if episode.curated:
                found.append(Asked(table[[at[place.unit_id] for place in episode.curated]], answered))
    return found


def fit_confidence(datasets: Sequence[Sequence[Asked]]) -> Array:
    """Return the weights that tell own questions from others; each half of each dataset weighs the same."""
    asked = [each for dataset in datasets for each in dataset]
    share = np.array([1 / sum(each.own == other.own for other in dataset) for dataset in datasets for each in dataset])
    wanted = np.array([float(each.own) for each in asked])
    weights = np.array([*[2.0] * (len(CONFIDENCE) - 1), -3.0])
    for _ in range(ROUNDS):
        best = np.array([each.features[np.argmax(each.features @ weights)] for each in asked])

        def loss(weights: Array, best: Array = best) -> tuple[float, Array]:
            values, free = best @ weights, np.r_[weights[:-1], 0]
            total = float(share @ (np.logaddexp(0, values) - wanted * values) + CONFIDENCE_RIDGE * free @ free)
            return total, best.T @ (share * (1 / (1 + np.exp(-values)) - wanted)) + 2 * CONFIDENCE_RIDGE * free

        bounds = [*[(0, None)] * (len(CONFIDENCE) - 1), (None, None)]
        weights = np.asarray(minimize(loss, weights, jac=True, method="L-BFGS-B", bounds=bounds).x, np.float64)
    return weights


def shares(asked: Sequence[Asked], weights: Array) -> dict[str, list[float]]:
    """Return for each threshold the share of own questions with something convincing, and of others with nothing."""
    own, others = (np.array([each.confidence(weights) for each in asked if each.own == own]) for own in (True, False))
    return {
        "convincing": [float(np.mean(own >= least)) for least in THRESHOLDS],
        "refused": [float(np.mean(others < least)) for least in THRESHOLDS],
    }


def _confidence_table(report: Mapping[str, Any]) -> str:
    lines = [", ".join(f"{name} {weight:.2f}" for name, weight in report["weights"].items())]
    lines.append(f"own questions with something convincing, others with nothing, from {report['thresholds']}")
    for row in report["datasets"]:
        for name in ("left out", "now"):
            pairs = zip(row[name]["convincing"], row[name]["refused"], strict=True)
            lines.append(f"{row['dataset'][-40:]:>40} {name:>9}  " + "  ".join(f"{a:.3f} {b:.3f}" for a, b in pairs))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
