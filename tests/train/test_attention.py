"""A model is trained with the attention that is asked for, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from harness1.config import Lora, Train
from harness1.errors import UsageError
from harness1.models.block_attention import NAME
from harness1.training import trainable as attention
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer
from harness1.training.trl_trainer import train_with_trl
from tests.tiny_models import save_tiny_model
from tests.train.test_micro_batch import made_rows

GPT_OSS = {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
CAPPED = {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}


def train_of(name: Any, dtype: Any = "float32") -> Train:
    return Train(attention=name, dtype=dtype, lora=Lora(rank=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def stepped(folder: Path, name: str, dtype: str = "float32") -> tuple[str, list[Tensor]]:
    """The implementation that was used, and the weights after two steps."""
    model: Any = load_trainable(folder, train_of(name, dtype), "cpu")
    trainer = Trainer(model, NegativeLogLikelihood(), train_of(name, dtype), 2)
    for _ in range(2):
        trainer.step(made_rows())
    return model.config._attn_implementation, trainer.parameters


def test_each_implementation_trains_the_same_and_auto_is_the_models_own(folder: Path) -> None:
    used, weights = {}, {}
    for name in ("auto", "sdpa", "eager"):
        used[name], weights[name] = stepped(folder, name)
    assert used == {"auto": "sdpa", "sdpa": "sdpa", "eager": "eager"}
    for own, sdpa, eager in zip(*weights.values(), strict=True):
        assert torch.equal(own, sdpa)
        torch.testing.assert_close(eager, own, rtol=1e-4, atol=1e-5)


def test_bfloat16_on_a_processor_trains_with_blocks_where_they_compute_the_same(folder: Path, tmp_path: Path) -> None:
    assert stepped(folder, "auto", "bfloat16")[0] == NAME
    capped = save_tiny_model(tmp_path / "capped", "gemma2", **CAPPED)
    model: Any = load_trainable(capped, train_of("auto", "bfloat16"), "cpu")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eager_and_sdpa_pass_in_both_precisions(folder: Path, dtype: str) -> None:
    for name in ("eager", "sdpa"):
        model: Any = load_trainable(folder, train_of(name, dtype), "cpu")
        assert model.config._attn_implementation == name
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "name", "reason"),
    [
        ("gpt_oss", GPT_OSS, "sdpa", "GptOssForCausalLM does not support"),
        ("gpt_oss", GPT_OSS, "flex_attention", "on CPU"),
        ("gpt_oss", GPT_OSS, "flash_attention_2", "cpu: "),
        ("llama", {}, "flex_attention", "on CPU"),
        ("llama", {}, "flash_attention_2", "FlashAttention2"),
        ("llama", {}, "flash_attention_3", "FlashAttention3"),
        ("gemma2", CAPPED, "sdpa", "leaves out something"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    kind: str, settings: dict[str, Any], name: str, reason: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path, kind, **settings)
    with pytest.raises(UsageError, match=f"^train.attention={name} does not train .* on cpu: ") as raised:
        load_trainable(folder, train_of(name), "cpu")
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_one_that_ignores_padding_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Callable[..., Any] = AttentionInterface()["sdpa"]

    def unmasked(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any) -> Any:
        return plain(module, query, key, value, None, **(options | {"is_causal": False}))

    AttentionInterface.register("unmasked", unmasked)
    model = load_trainable(folder, train_of("auto"), "cpu")
    with pytest.raises(UsageError, match="leaves out something"):
        attention.use_attention(model, "unmasked", "float32")


def test_cudnn_whose_gradients_of_padded_rows_can_be_nan_is_left_out(folder: Path) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        load_trainable(folder, train_of("auto"), "cpu")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_trl_places_the_model_itself(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="flash_attention_2 needs our own trainer"):
        train_with_trl(made_rows(), [], folder, tmp_path, train_of("flash_attention_2"), print)
