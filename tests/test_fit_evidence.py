"""The fits of evidence weights and of confidence: what they learn, and what they leave out to show whether it carries
over."""

import numpy as np

from benchmarks.fit_evidence import Asked, Found, fit, fit_confidence, shares
from harness1.memory.confidence import FITTED
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


def test_a_confidence_is_learned_from_the_best_document_of_each_question() -> None:
    draw = np.random.default_rng(0)

    def asked(own: bool) -> Asked:
        table = draw.random((6, len(FITTED))) / 2
        table[:, -1], table[draw.integers(6), FITTED._fields.index("names")] = 1.0, own
        return Asked(table, own)

    questions = [asked(own) for own in (True, False) for _ in range(40)]
    weights = fit_confidence([questions])
    assert FITTED._fields[int(weights.argmax())] == "names"
    assert weights[:-1].min() >= 0
    found = shares(questions, weights)
    assert found["convincing"][-1] > 0.9 < found["refused"][-1]
