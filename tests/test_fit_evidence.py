"""The fit of the evidence weights: what it learns, and what it leaves out to show whether that carries over."""

import numpy as np

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
