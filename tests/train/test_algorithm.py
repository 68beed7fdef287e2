"""The loss of supervised fine-tuning is a mean over weights."""

from __future__ import annotations

import pytest
import torch

from harness1.errors import UsageError
from harness1.rows import TrainRow
from harness1.training.algorithm import ALGORITHMS, NegativeLogLikelihood, make_algorithm
from harness1.training.trainer import collate

PLAIN = TrainRow((5, 6, 7, 8), (0, 1, 0, 1))
WEIGHTED = TrainRow((5, 6, 7), (0, 1, 1), advantages=(3.0, 0.25, 0.5))
"""What stands in advantages where nothing is trained counts nowhere."""


def test_without_weights_trained_tokens_are_counted() -> None:
    assert NegativeLogLikelihood().normaliser([PLAIN]) == 2


def test_weights_of_trained_tokens_are_summed_and_rows_add_up() -> None:
    algorithm = NegativeLogLikelihood()
    assert algorithm.normaliser([WEIGHTED]) == 0.75
    assert algorithm.normaliser([PLAIN, WEIGHTED, PLAIN]) == 4.75


def test_the_loss_of_a_token_is_its_weighted_negative_log_probability() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    losses = NegativeLogLikelihood().token_losses(logprobs, collate([PLAIN, WEIGHTED]))
    assert losses.tolist() == [1.0, 2.0, 0.75, 2.0]


def test_algorithms_are_made_by_name() -> None:
    assert make_algorithm("nll") == NegativeLogLikelihood()
    with pytest.raises(UsageError, match=r"no loss 'ppo'; choose one of .*nll"):
        make_algorithm("ppo")
    assert "nll" in ALGORITHMS
