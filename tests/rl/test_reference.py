"""The divergence from the policy that training began with is a penalty on each token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from harness1.config import Lora, Train
from harness1.errors import UsageError
from harness1.models.transformers.causal_model import load_causal_model
from harness1.rl.reference import row_logprobs, with_kl
from harness1.rows.row import TrainRow
from harness1.train.cispo import Cispo
from harness1.train.trainable import load_trainable
from harness1.train.trainer import Trainer
from tests.tiny_models import save_tiny_model
from tests.train.test_micro_batch import made_rows, plain_logprobs
from tests.train.test_trainer import SMALL

ROWS = [
    TrainRow((5, 6, 7, 8), (0, 1, 0, 1), (0.0, -1.0, 0.0, -2.0), (0.0, 0.5, 0.0, 0.5)),
    TrainRow((5, 6), (0, 1), (0.0, -3.0), (9.0, -1.0)),
]
REFERENCE = [[-1.5, -2.0], [-2.0]]
"""Differences of 0.5, 0 and -1, with the mean -1/6."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_causal_model(folder, "cpu", "float32")


@pytest.mark.parametrize("micro_tokens", [1, 30, 10_000])
def test_log_probabilities_are_those_of_each_row_in_the_order_given(model: PreTrainedModel, micro_tokens: int) -> None:
    rows = made_rows()
    found = row_logprobs(model, rows, Train(dtype="float32", micro_tokens=micro_tokens))
    assert all(parameter.grad is None for parameter in model.parameters())
    for row, logprobs in zip(rows, found, strict=True):
        with torch.no_grad():
            assert logprobs == pytest.approx(plain_logprobs(model, row).tolist(), abs=1e-5)


@pytest.mark.parametrize("lora", [Lora(rank=0), Lora(rank=4)], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_has_not_stepped_finds_itself_where_its_reference_is(
    folder: Path, lora: Lora, dtype: str
) -> None:
    train = Train(dtype=dtype, lora=lora, micro_tokens=40)  # type: ignore[arg-type]
    trainer, frozen = (
        Trainer(load_trainable(folder, train, "cpu"), Cispo(), train, 1),
        load_trainable(folder, train, "cpu"),
    )
    rows = []
    for row, logprobs in zip(made_rows(), row_logprobs(frozen, made_rows(), train), strict=True):
        known = iter(logprobs)
        rows.append(
            TrainRow(row.token_ids, row.loss_mask, tuple(next(known) if each else 0.0 for each in row.loss_mask))
        )
    assert trainer.step(rows)["log_ratio_max"] == 0.0


def test_a_penalty_by_hand() -> None:
    rows, divergence = with_kl(ROWS, REFERENCE, 0.3)
    assert divergence == pytest.approx(-1 / 6)
    assert rows[0].advantages == pytest.approx((0.0, 0.5 - 0.3 * (0.5 + 1 / 6), 0.0, 0.5 - 0.3 / 6))
    assert rows[1].advantages == pytest.approx((9.0, -1.0 + 0.3 * (1 - 1 / 6)))


def test_penalties_move_no_baseline() -> None:
    rows, _ = with_kl(ROWS, REFERENCE, 5.0)
    moved = [
        after - before
        for row, old in zip(rows, ROWS, strict=True)
        for after, before in zip(row.advantages or (), old.advantages or (), strict=True)
    ]
    assert sum(moved) == pytest.approx(0.0)
    assert any(moved)


def test_at_the_reference_nothing_is_penalised() -> None:
    same = [[-1.0, -2.0], [-3.0]]
    assert with_kl(ROWS, same, 5.0) == (ROWS, 0.0)


def test_rows_without_recorded_log_probabilities_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rl\.kl"):
        with_kl([TrainRow((1, 2), (0, 1))], [[-1.0]], 0.1)
