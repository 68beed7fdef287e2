"""A model is loaded for training in the types that its weights are trained, or frozen, in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness1.config import Lora, Train
from harness1.errors import UsageError
from harness1.models.adapters import adapters_of, add_adapters, write_adapters
from harness1.training.trainable import load_trainable
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), attention_dropout=0.5, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("rank", "dtype", "weights"),
    [
        (0, "float32", torch.float32),
        (0, "bfloat16", torch.float32),
        (8, "float32", torch.float32),
        (8, "bfloat16", torch.bfloat16),
    ],
)
def test_only_weights_that_stay_frozen_are_rounded(folder: Path, rank: int, dtype: Any, weights: torch.dtype) -> None:
    model: Any = load_trainable(folder, Train(lora=Lora(rank=rank), dtype=dtype), "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {weights}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not model.training
    ids = torch.arange(9)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        logits, again = (model(input_ids=ids).logits for _ in range(2))
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9
    assert torch.equal(logits, again)


def test_threads_are_set_where_some_are_asked_for(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        load_trainable(folder, Train(), "cpu", threads=before + 1)
        assert torch.get_num_threads() == before + 1
        load_trainable(folder, Train(), "cpu")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_adapters_are_trained_further_in_the_layers_that_they_are_in(tmp_path: Path, folder: Path) -> None:
    model: Any = load_trainable(folder, Train(lora=Lora(rank=4)), "cpu")
    add_adapters(model, Lora(rank=4, layers=1), seed=0)
    adapters = adapters_of(model)
    assert adapters is not None
    write_adapters(tmp_path, adapters, folder)
    load_trainable(tmp_path, Train(lora=Lora(rank=4, layers=1)), "cpu")
    with pytest.raises(UsageError, match=r"train\.lora\.layers=1"):
        load_trainable(tmp_path, Train(lora=Lora(rank=4)), "cpu")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a causal language model"):
        load_trainable(tmp_path, Train(), "cpu")
