"""The fit of the evidence weights: what it learns, and what it leaves out to show whether that carries over."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fit_evidence
from benchmarks.fit_evidence import Found, fit
from harness1.memory.ranking import FEATURES

TITLE, LINK = FEATURES.index("title"), FEATURES.index("link")


def split(telling: int, seed: int) -> list[Found]:
    """Tasks of six units, of which the one with the highest value of the telling feature is gold."""
    draw = np.random.default_rng(seed)
    tables = [draw.random((6, len(FEATURES))) for _ in range(60)]
    return [Found(table, table[:, telling] == table[:, telling].max(), 1) for table in tables]


def test_the_feature_that_tells_gold_gets_the_weight_and_none_is_negative() -> None:
    weights = fit([split(TITLE, 0)])
    assert weights.argmax() == TITLE
    assert weights[TITLE] > 3 * np.delete(weights, TITLE).max()
    assert weights.min() >= 0.0


def test_recall_counts_gold_that_was_never_found() -> None:
    found = Found(np.eye(len(FEATURES))[:2], np.array([True, False]), 2)
    assert found.recall(np.eye(len(FEATURES))[0], 1) == 0.5
    assert found.recall(np.eye(len(FEATURES))[1], 1) == 0.0


def test_a_dataset_is_left_out_with_and_without_its_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"one": split(TITLE, 0), "one untitled": split(TITLE, 1), "two": split(LINK, 2)}
    learned: list[int] = []

    def counted(splits: list[list[Found]]) -> np.ndarray:
        learned.append(len(splits))
        return fit(splits)

    monkeypatch.setattr(fit_evidence, "fit", counted)
    row = fit_evidence._row("one untitled", found, fit(list(found.values())), np.ones(len(FEATURES)))
    assert learned == [1]
    assert row["left_out"][0] < row["fitted"][0]
