"""Fit how sure it is that a document is one that a question asks for, and show how well "nothing convincing" is said.

The script plays questions of each dataset over its own corpus, which answers them, and questions of all others over it,
which it mostly does not: datasets on the same subjects answer some of each other's. The confidence is that of the best
delivered document, so the weights are fitted in turns with the choice of that document; none is negative. Each row is
measured with the weights fitted without its dataset (`left out`), and with those that the package has (`now`).

    python benchmarks/fit_confidence.py $DATA/scifact:train $TRAIN/nq_oracle:train ... --indexes indexes [--tasks 100]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped, unused-ignore]

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.memory.confidence import CONVINCING, FITTED, Features, features
from harness1.policy.registry import open_policy
from harness1.records import Task
from harness1.retrieval.open import open_retriever

RIDGE, ROUNDS = 1e-2, 6
THRESHOLDS = (CONVINCING, 0.2, 0.3, 0.5)
Array = NDArray[np.float64]


class Asked(NamedTuple):
    """A question: the features of what was delivered [documents, features], and whether the corpus answers it."""

    features: Array
    own: bool

    def confidence(self, weights: Array) -> float:
        return float(1 / (1 + np.exp(-(self.features @ weights).max())))


Asking = Mapping[str, Sequence[Asked]]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Fit and print; return what `--json` prints."""
    options = _options(arguments)
    places = dict.fromkeys(options.datasets)
    tasks = {place: open_source(place.rpartition(":")[0]).tasks(place.rpartition(":")[2]) for place in places}
    found = {place: asyncio.run(_ask(place, tasks, options)) for place in places}
    weights, now = fit([*found.values()]), np.array(FITTED)
    rows = list[dict[str, Any]]()
    for place, asked in found.items():
        others = [each for other, each in found.items() if other != place]
        left_out = fit(others) if others else weights
        rows.append(
            {"dataset": place} | {name: shares(asked, each) for name, each in (("left out", left_out), ("now", now))}
        )
    report = {"weights": Features(*map(float, weights))._asdict(), "thresholds": THRESHOLDS, "datasets": rows}
    print(json.dumps(report) if options.json else _table(report))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fit_confidence", description="Fit how sure it is of a document.")
    parser.add_argument("datasets", nargs="+", metavar="FOLDER:SPLIT", help="splits that are no test splits")
    parser.add_argument("--indexes", type=Path, default=Path("indexes"), help="folder of their indexes")
    parser.add_argument("--tasks", type=int, default=100, help="questions of each split, and of all others together")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


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
            episode = await rollout(env, open_policy("scripted"), task.public())
            memory = env.state.memory
            table = features(memory.query, [(e.title, memory.text_of(unit)) for unit, e in memory.pool.entries.items()])
            at = {unit: number for number, unit in enumerate(memory.pool.entries)}
            if episode.curated:
                found.append(Asked(table[[at[place.unit_id] for place in episode.curated]], answered))
    return found


def fit(datasets: Sequence[Sequence[Asked]]) -> Array:
    """Return the weights that tell own questions from others; each half of each dataset weighs the same."""
    asked = [each for dataset in datasets for each in dataset]
    share = np.array([1 / sum(each.own == other.own for other in dataset) for dataset in datasets for each in dataset])
    wanted = np.array([float(each.own) for each in asked])
    weights = np.array([*[2.0] * (len(FITTED) - 1), -3.0])
    for _ in range(ROUNDS):
        best = np.array([each.features[np.argmax(each.features @ weights)] for each in asked])

        def loss(weights: Array, best: Array = best) -> tuple[float, Array]:
            values, free = best @ weights, np.r_[weights[:-1], 0]
            total = float(share @ (np.logaddexp(0, values) - wanted * values) + RIDGE * free @ free)
            return total, best.T @ (share * (1 / (1 + np.exp(-values)) - wanted)) + 2 * RIDGE * free

        bounds = [*[(0, None)] * (len(FITTED) - 1), (None, None)]
        weights = np.asarray(minimize(loss, weights, jac=True, method="L-BFGS-B", bounds=bounds).x, np.float64)
    return weights


def shares(asked: Sequence[Asked], weights: Array) -> dict[str, list[float]]:
    """Return for each threshold the share of own questions with something convincing, and of others with nothing."""
    own, others = (np.array([each.confidence(weights) for each in asked if each.own == own]) for own in (True, False))
    return {
        "convincing": [float(np.mean(own >= least)) for least in THRESHOLDS],
        "refused": [float(np.mean(others < least)) for least in THRESHOLDS],
    }


def _table(report: Mapping[str, Any]) -> str:
    lines = [", ".join(f"{name} {weight:.2f}" for name, weight in report["weights"].items())]
    lines.append(f"own questions with something convincing, others with nothing, from {report['thresholds']}")
    for row in report["datasets"]:
        for name in ("left out", "now"):
            pairs = zip(row[name]["convincing"], row[name]["refused"], strict=True)
            lines.append(f"{row['dataset'][-40:]:>40} {name:>9}  " + "  ".join(f"{a:.3f} {b:.3f}" for a, b in pairs))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
