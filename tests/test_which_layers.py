"""The choice of layers for a small student."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.which_layers import Left, removals

IDS = [3, 1, 4, 1, 5, 2]
WORDS = 8


class Voices:
    """A model of which each layer adds its own weight to the logit of the right token."""

    def __init__(self, weights: list[float]) -> None:
        layers = [torch.nn.Linear(1, 1, bias=False) for _ in weights]
        for layer, weight in zip(layers, weights, strict=True):
            torch.nn.init.constant_(layer.weight, weight)
        self.model = SimpleNamespace(layers=torch.nn.ModuleList(layers))

    def __call__(self, tokens: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        right = torch.nn.functional.one_hot(tokens[:, 1:], WORDS).float()
        scaled = right * sum(float(layer.weight) for layer in self.model.layers)
        return SimpleNamespace(logits=torch.cat([scaled, torch.zeros(1, 1, WORDS)], 1))


def test_the_layer_that_adds_least_goes_first_and_the_first_layer_stays() -> None:
    found = list(removals(Voices([0.0, 3.0, -1.0, 0.5, 2.0]), IDS, 2))
    assert [left.layers for left in found] == [[0, 1, 3, 4], [0, 1, 4], [0, 1]]


def test_what_is_left_is_measured_by_the_tokens_after_the_first() -> None:
    (left,) = removals(Voices([1.0, 2.0, 0.25]), IDS, 2)
    assert left == Left([0, 1], pytest.approx(-torch.log_softmax(torch.tensor([3.0] + [0.0] * 7), 0)[0].item()))
