"""The fit of the verifier: what it learns, and that labels, datasets and claims weigh as they should."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fit_verifier
from benchmarks.fit_verifier import Pair, Table, fit, predict
from harness1.env.verifiers.fitted import LABELS

NAMES = ("one", "two", "three")
CODES = list(LABELS)


def table_of(counts: dict[tuple[str, str], int], seed: int = 0) -> Table:
    """Pairs by dataset and label; the feature with the label's number is high, the others are noise."""
    draw = np.random.default_rng(seed)
    pairs, values = [], []
    for (dataset, label), count in counts.items():
        for number in range(count):
            pairs.append(Pair(dataset, f"claim {dataset} {number}", "text", label))
            values.append(draw.random(3) + 2.0 * np.eye(3)[CODES.index(label)])
    labels = np.array([CODES.index(pair.label) for pair in pairs])
    short = np.zeros(len(pairs), bool)
    return Table(pairs, np.array(values), short, labels, np.array([pair.dataset for pair in pairs]))


EVEN = table_of({("a", label): 30 for label in CODES} | {("b", label): 30 for label in CODES})


def test_labels_are_told_apart_by_the_features_that_tell_them() -> None:
    weights = fit(EVEN, NAMES)
    other = table_of({("c", label): 20 for label in CODES}, seed=1)
    assert (predict(weights, other) == other.labels).mean() > 0.95


def test_each_label_of_each_dataset_weighs_the_same() -> None:
    table = table_of({("a", "yes"): 40, ("a", "no"): 5, ("b", "unclear"): 20})
    weights = fit_verifier._importance(table)
    assert weights.sum() == pytest.approx(1.0)
    groups = zip(table.datasets.tolist(), table.labels.tolist(), strict=True)
    sums: dict[tuple[str, int], float] = {}
    for group, weight in zip(groups, weights.tolist(), strict=True):
        sums[group] = sums.get(group, 0.0) + weight
    assert list(sums.values()) == pytest.approx([1 / 3] * 3)


def test_a_dataset_without_contradictions_does_not_say_that_there_are_none() -> None:
    table = table_of({("a", "yes"): 2, ("a", "unclear"): 2, ("b", "yes"): 1, ("b", "no"): 1})
    meant = fit_verifier._meant(table)
    no = CODES.index("no")
    supported = table.labels == CODES.index("yes")
    assert meant[supported & (table.datasets == "a"), no].all()
    assert not meant[supported & (table.datasets == "b"), no].any()
    assert meant[np.arange(len(table.pairs)), table.labels].all()


def test_a_part_is_predicted_by_weights_that_never_saw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[set[str]] = []

    def noted(table: Table, names: tuple[str, ...]) -> fit_verifier.Fit:
        learned.append(set(table.datasets.tolist()))
        return fit(table, NAMES)

    monkeypatch.setattr(fit_verifier, "fit", noted)
    predicted = fit_verifier._left_out(EVEN)
    assert learned == [{"b"}, {"a"}]
    assert (predicted == EVEN.labels).mean() > 0.95


def test_claims_are_not_split_between_what_is_learned_and_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[set[str]] = []
    every = {pair.claim for pair in EVEN.pairs}

    def noted(table: Table, names: tuple[str, ...]) -> fit_verifier.Fit:
        held.append(every - {pair.claim for pair in table.pairs})
        return fit(table, NAMES)

    monkeypatch.setattr(fit_verifier, "fit", noted)
    fit_verifier._crossed(EVEN)
    assert len(held) == fit_verifier.FOLDS
    assert set().union(*held) == every
    assert sum(map(len, held)) == len(every)
