"""The distribution that is sampled from."""

from __future__ import annotations

import math

import pytest
import torch

from harness1.errors import UsageError
from harness1.models.backend import check_sampling, draw, process_logprobs
from harness1.records import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.5]])


def test_without_settings_it_is_the_softmax_in_float32_of_logits_over_the_temperature() -> None:
    assert torch.equal(process_logprobs(LOGITS.bfloat16(), Sampling()), LOGITS.log_softmax(-1))
    assert torch.allclose(process_logprobs(LOGITS, Sampling(temperature=0.5)), (LOGITS / 0.5).log_softmax(-1))
    greedy = process_logprobs(LOGITS, Sampling(temperature=0.0, top_p=0.5, top_k=3))
    assert greedy.tolist() == [[0.0, -math.inf, -math.inf, -math.inf], [-math.inf, -math.inf, 0.0, -math.inf]]


def test_top_k_keeps_the_most_likely_and_renormalises() -> None:
    logprobs = process_logprobs(LOGITS, Sampling(top_k=2))
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(2))
    assert logprobs.isfinite().tolist() == [[True, True, False, False], [False, False, True, True]]
    assert float(logprobs[0, 0] - logprobs[0, 1]) == pytest.approx(1.0)


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    for top_p, kept in ((0.4, 1), (0.5001, 2), (0.76, 3), (0.95, 4), (1e-9, 1)):
        logprobs = process_logprobs(probabilities.log(), Sampling(top_p=top_p))
        expected = probabilities.where(probabilities >= probabilities.sort(descending=True).values[kept - 1], 0.0)
        assert torch.allclose(logprobs.exp(), expected / expected.sum(), atol=1e-6), top_p


def test_grammar_temperature_top_k_and_top_p_come_in_this_order() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    mask = torch.tensor([False, True, True, True])
    # Without the first: 1/2, 1/3, 1/6; squared: 9, 4, 1; two of them are 9/13 and 4/13; 0.69 needs one only.
    squared = {"temperature": 0.5, "top_k": 2}
    both = process_logprobs(probabilities.log(), Sampling(**squared, top_p=0.7), mask)
    assert torch.allclose(both.exp(), torch.tensor([0, 9 / 13, 4 / 13, 0]), atol=1e-6)
    one = process_logprobs(probabilities.log(), Sampling(**squared, top_p=0.69), mask)
    assert torch.allclose(one.exp(), torch.tensor([0.0, 1.0, 0.0, 0.0]), atol=1e-6)


def test_what_is_kept_can_be_differentiated() -> None:
    logits = LOGITS.clone().requires_grad_()
    process_logprobs(logits, Sampling(temperature=0.7, top_k=3, top_p=0.9))[0, 0].backward()
    assert logits.grad.isfinite().all()


def test_draws_follow_the_distribution_and_never_are_a_token_of_probability_0() -> None:
    logprobs = process_logprobs(LOGITS, Sampling(top_k=3))
    uniforms = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    for row in logprobs:
        ids = draw(row.expand(len(uniforms), -1), uniforms)
        shares = torch.bincount(ids, minlength=4) / len(uniforms)
        assert torch.allclose(shares, row.exp(), atol=2e-4)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        one = torch.tensor([[-math.inf, 0.0, -math.inf]])
        assert draw(one, torch.tensor([uniform], dtype=torch.float64)).tolist() == [1]


def test_settings_that_name_no_distribution_are_refused() -> None:
    for name, value in (
        *(("temperature", -0.1), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)),
        ("max_tokens", 0),
    ):
        with pytest.raises(UsageError, match=name):
            check_sampling(Sampling(**{name: value}))
