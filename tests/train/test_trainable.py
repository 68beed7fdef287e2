"""A model is loaded for training in the types that its weights are trained, or frozen, in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from harness1.config import Lora, Train
from harness1.errors import UsageError
from harness1.models.adapters import adapters_of, add_adapters, write_adapters
from harness1.models.block_attention import NAME
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from harness1.runs.files import read_stage, write_json
from harness1.training import trainable as attention
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.trainable import load_trainable, merge, rounding_loss
from harness1.training.trainer import Trainer
from tests.cli.commands import command_in_process
from tests.models.test_adapters import EXPERTS, KINDS_OF_MIXTURES, PLAIN, logits_of, save_adapters, stir
from tests.tiny_models import GPT_OSS, save_tiny_model
from tests.train.test_trainer import made_rows


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


def test_adapters_are_trained_further_in_the_layers_that_they_are_in(tmp_path: Path, folder: Path) -> None:
    model: Any = load_trainable(folder, Train(lora=Lora(rank=4)), "cpu")
    add_adapters(model, Lora(rank=4, layers=1), seed=0)
    adapters = adapters_of(model)
    assert adapters is not None
    write_adapters(tmp_path, adapters, folder)
    load_trainable(tmp_path, Train(lora=Lora(rank=4, layers=1)), "cpu")
    with pytest.raises(UsageError, match=r"train\.lora\.layers=1"):
        load_trainable(tmp_path, Train(lora=Lora(rank=4)), "cpu")
    with pytest.raises(UsageError, match="not a causal language model"):
        load_trainable(tmp_path / "nothing", Train(), "cpu")


CAPPED = {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}


def train_of(name: Any, dtype: Any = "float32") -> Train:
    return Train(attention=name, dtype=dtype, lora=Lora(rank=0))


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
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "name", "reason"),
    [
        ("gpt_oss", GPT_OSS, "sdpa", "GptOssForCausalLM does not support"),
        ("gpt_oss", GPT_OSS, "flex_attention", "on CPU"),
        ("llama", {}, "flex_attention", "on CPU"),
        ("llama", {}, "flash_attention_2", "FlashAttention2"),
        ("gemma2", CAPPED, "sdpa", "leaves out something"),
    ],
)
def test_what_cannot_run_is_told(kind: str, settings: dict[str, Any], name: str, reason: str, tmp_path: Path) -> None:
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


def test_threads_are_set_where_asked_for_and_cudnn_whose_gradients_of_padded_rows_can_be_nan_is_left_out(
    folder: Path,
) -> None:
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        load_trainable(folder, train_of("auto"), "cpu", threads=threads + 1)
        load_trainable(folder, train_of("auto"), "cpu")
        assert (torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()) == (threads + 1, False)
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.mark.parametrize(("kind", "lora"), [("llama", PLAIN), ("gpt_oss", EXPERTS)])
def test_the_merged_model_is_a_plain_one_that_computes_the_same(tmp_path: Path, kind: str, lora: Lora) -> None:
    base = save_tiny_model(tmp_path / "base", kind, **KINDS_OF_MIXTURES.get(kind, {}))
    model = save_adapters(tmp_path / "adapters", base, lora)
    card = Checkpoint(format="f", counter="c", env={}, env_hash="e", base="b", step=7, origins=("scifact",))
    write_json(tmp_path / "adapters" / CHECKPOINT, card)
    lost = merge(tmp_path / "adapters", tmp_path / "merged", "float32")
    assert lost < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(plain), logits_of(model), rtol=0, atol=1e-4)
    assert read_checkpoint(tmp_path / "merged") == card
    assert read_stage(tmp_path / "merged").origins == ("scifact", "unknown:base")
    with pytest.raises(UsageError, match="no adapters"):
        merge(base, tmp_path / "none", "bfloat16")
    with pytest.raises(UsageError, match="not empty"):
        merge(tmp_path / "adapters", base, "bfloat16")


def test_rounding_loses_more_of_smaller_updates(tmp_path: Path) -> None:
    model = load_causal_model(save_tiny_model(tmp_path), "cpu", "bfloat16")
    add_adapters(model, PLAIN, seed=0)
    stir(model)
    lost = []
    for factor in (1.0, 1e-2, 1e-6):
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.mul_(factor)
        lost.append(rounding_loss(model, "bfloat16"))
    assert lost[0] < 0.1 < lost[1] < lost[2] == pytest.approx(1.0, abs=0.1), "at last all of it"


def test_a_loss_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_adapters(tmp_path / "adapters", save_tiny_model(tmp_path / "base"))
    places = [str(tmp_path / "adapters"), "--out", str(tmp_path / "merged")]
    found = json.loads(command_in_process(monkeypatch, capsys)("models", "merge", *places, "--json").out)
    assert (found["dtype"], found["total"] > 0) == ("bfloat16", True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16
