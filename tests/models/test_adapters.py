"""Adapters begin as the identity, stand beside every linear layer but the head, and are merged into a plain model."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from harness1.config import Lora
from harness1.errors import UsageError
from harness1.model_folder import ADAPTER_CONFIG, base_folder, folder_hash
from harness1.models.adapters import (
    ADAPTER_WEIGHTS,
    Adapters,
    adapters_of,
    add_adapters,
    drop_adapters,
    keep_rounded,
    layer_of,
    list_adapters,
    merge_state,
    put_adapters,
    read_adapters,
    write_adapters,
)
from harness1.models.causal_model import context_window, load_causal_model
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.runs.files import write_json
from tests.tiny_models import GPT_OSS, save_tiny_model

PLAIN, LAST = Lora(rank=4, alpha=8.0), Lora(rank=4, alpha=8.0, layers=1)
IDS = torch.arange(20)[None]
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("llama", {"attention_bias": True, "mlp_bias": True}), ("llama", {"tie_word_embeddings": True})),
    *((kind, {}) for kind in ("qwen2", "qwen3", "gemma2", "phi3")),
)
EXPERTS = Lora(rank=4, alpha=6.0, experts=True)
KINDS_OF_MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def save_base(folder: Path, kind: str = "llama", **settings: Any) -> Path:
    return save_tiny_model(folder, kind, **KINDS_OF_MIXTURES.get(kind, {}), **settings)


def loaded(folder: Path, kind: str = "llama", dtype: Any = "float32", **settings: Any) -> Any:
    return load_causal_model(save_base(folder, kind, **settings), "cpu", dtype)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def stir(model: Any, seed: int = 0) -> None:
    """Give every trained parameter some other value."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def adapted(folder: Path, lora: Lora = PLAIN, kind: str = "llama", dtype: Any = "float32", **settings: Any) -> Any:
    """A model with adapters of random values."""
    return with_adapters(loaded(folder, kind, dtype, **settings), lora)


def with_adapters(model: Any, lora: Lora) -> Any:
    add_adapters(model, lora, seed=0)
    stir(model)
    return model


def own_adapters(model: Any) -> Adapters:
    found = adapters_of(model)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_linear_layer_but_the_head_gets_one_that_changes_nothing_untrained(tmp_path: Path, dtype: str) -> None:
    model = loaded(tmp_path, dtype=dtype)
    before = logits_of(model)
    linear = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)} - {"lm_head"}
    add_adapters(model, PLAIN, seed=0)
    assert torch.equal(logits_of(model), before)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert trained.keys() == {f"{name}.{part}.weight" for name in linear for part in ("lora_A", "lora_B")}
    assert len(linear) == 14
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert {value.dtype for value in model.parameters() if not value.requires_grad} == {getattr(torch, dtype)}
    assert not any(value.any() for name, value in trained.items() if "lora_B" in name)
    stir(model)
    assert not torch.allclose(logits_of(model), before, atol=1e-2)


def test_last_layers_alone_are_adapted_where_asked_and_the_backward_pass_ends_there(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    add_adapters(model, Lora(rank=4, layers=1), seed=0)
    assert {layer_of(name) for name, _ in list_adapters(model)} == {1}
    inner: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, hidden: inner.append(hidden))
    model(input_ids=IDS)
    assert [hidden.requires_grad for hidden in inner] == [False, True]


@pytest.mark.parametrize(
    ("kind", "settings", "lora", "reason"),
    [
        ("llama", {}, Lora(rank=4, layers=3), r"has 2 layers: train\.lora\.layers=3"),
        ("llama", {}, Lora(rank=4, experts=True), r"no mixture of experts.*train\.lora\.experts=false"),
        ("gpt2", {"n_inner": 96, "n_positions": 64}, Lora(rank=4), r"no linear layers .*train\.lora\.rank=0"),
    ],
)
def test_a_model_that_lacks_what_is_to_be_adapted_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], lora: Lora, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        add_adapters(loaded(tmp_path, kind, **settings), lora, seed=0)


def test_beginnings_are_drawn_by_the_seed_one_for_each_layer(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[Tensor]:
        model = loaded(tmp_path)
        add_adapters(model, PLAIN, seed)
        return [value for name, value in model.named_parameters() if "lora_A" in name]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert len({value.flatten()[0].item() for value in first}) == len(first)
    assert all(value.abs().max() <= value.shape[1] ** -0.5 for value in first)
    assert all(value.abs().mean() > 0.4 * value.shape[1] ** -0.5 for value in first)


@pytest.mark.parametrize(
    ("kind", "settings", "lora"),
    [*((kind, settings, PLAIN) for kind, settings in KINDS), *((kind, {}, EXPERTS) for kind in KINDS_OF_MIXTURES)],
)
def test_a_plain_model_with_the_merged_weights_computes_the_same(
    tmp_path: Path, kind: str, settings: dict[str, Any], lora: Lora
) -> None:
    model = adapted(tmp_path, lora, kind, **settings)
    plain = load_causal_model(tmp_path, "cpu", "float32")
    before, merged = logits_of(plain), merge_state(model)
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged, strict=True)
    torch.testing.assert_close(logits_of(plain), logits_of(model), rtol=0, atol=1e-4)
    assert not torch.allclose(logits_of(model), before, atol=1e-2)


def test_merged_weights_leave_the_model_as_it_is_and_do_not_follow_it(tmp_path: Path) -> None:
    model = adapted(tmp_path, dtype="bfloat16")
    before, merged = logits_of(model), merge_state(model)
    assert torch.equal(logits_of(model), before)
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    kept = {name: value.clone() for name, value in merged.items()}
    stir(model)
    assert all(torch.equal(merged[name], value) for name, value in kept.items())
    drop_adapters(model)
    own, plain = model.state_dict(), merge_state(model)
    assert own.keys() == plain.keys()
    assert all(torch.equal(plain[name], value) for name, value in own.items())


@pytest.mark.parametrize("kind", KINDS_OF_MIXTURES)
def test_experts_get_an_adapter_for_each_of_their_parameters(tmp_path: Path, kind: str) -> None:
    model = loaded(tmp_path, kind)
    before = logits_of(model)
    add_adapters(model, EXPERTS, seed=0)
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=1e-4)
    model(input_ids=IDS).logits.square().mean().backward()
    added = {name: value for name, value in model.named_parameters() if value.requires_grad and ".experts." in name}
    assert len(added) == 2 * 2 * 2, "layers, parameters, A and B"
    assert all(value.grad is not None and value.grad.any() for name, value in added.items() if "lora_B" in name)


@pytest.mark.parametrize("kind", ["llama", *KINDS_OF_MIXTURES])
def test_adapters_move_between_models_in_place_of_others_and_can_be_taken_off(tmp_path: Path, kind: str) -> None:
    lora = PLAIN if kind == "llama" else EXPERTS
    model, other = adapted(tmp_path, lora, kind), loaded(tmp_path, kind)
    before, adapters = logits_of(other), own_adapters(model)
    assert adapters.lora == lora
    add_adapters(other, Lora(rank=2, alpha=2.0), seed=0)
    for _ in range(2):
        put_adapters(other, adapters)
        assert torch.equal(logits_of(other), logits_of(model))
    drop_adapters(other)
    with pytest.raises(UsageError, match="these adapters do not fit"):
        put_adapters(other, own_adapters(adapted(tmp_path / "wide", lora, kind, hidden_size=32)))
    assert adapters_of(other) is None
    assert torch.equal(logits_of(other), before)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_updates_are_computed_in_float32_also_under_automatic_mixed_precision(tmp_path: Path, kind: str) -> None:
    model = adapted(tmp_path, PLAIN if kind == "llama" else EXPERTS, kind)
    products: list[Tensor] = []
    for _, layer in list_adapters(model):
        layer.lora_A.register_forward_hook(lambda _, given, out: products.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        logits_of(model)
    assert products
    assert {value.dtype for value in products} == {torch.float32}


def test_rounded_factors_compute_nearly_the_same_and_are_kept_until_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path, dtype="bfloat16")
    add_adapters(model, PLAIN, seed=0)
    start = logits_of(model)
    stir(model)
    exact, gradient = logits_of(model), gradient_of(model)
    monkeypatch.setattr("harness1.models.adapters.ROUNDED_ON", ("cpu",))
    rounded = logits_of(model)
    assert 0 < (rounded - exact).norm() < 0.05 * (exact - start).norm()
    assert torch.nn.functional.cosine_similarity(gradient_of(model), gradient, dim=0) > 0.99
    keep_rounded(model)
    assert torch.equal(logits_of(model), rounded)
    stir(model, seed=1)
    assert torch.equal(logits_of(model), rounded)
    keep_rounded(model)
    assert (logits_of(model) - rounded).norm() > 0.5 * (rounded - start).norm()


def gradient_of(model: Any) -> Tensor:
    """Of the adapters, for the likelihood of the ids."""
    model.zero_grad()
    model(input_ids=IDS).logits.float().log_softmax(-1)[0, :-1].gather(-1, IDS[0, 1:, None]).sum().backward()
    return torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])


def save_adapters(folder: Path, base: Path, lora: Lora = PLAIN) -> Any:
    """Adapters with random values in a folder; the model that has them."""
    model = with_adapters(load_causal_model(base, "cpu", "float32"), lora)
    write_adapters(folder, own_adapters(model), base)
    return model


def settings(folder: Path, **changed: Any) -> None:
    path = folder / ADAPTER_CONFIG
    found = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**found, **changed}))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "base")


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        *(("llama", PLAIN), ("llama", LAST), ("qwen3", PLAIN), ("gpt_oss", PLAIN)),
        *((kind, EXPERTS) for kind in KINDS_OF_MIXTURES),
    ],
)
def test_peft_computes_the_same_from_the_folder(tmp_path: Path, kind: str, lora: Lora) -> None:
    base = save_base(tmp_path / "base", kind)
    model = save_adapters(tmp_path / "out", base, lora)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits_of(plain)
    by_peft = PeftModel.from_pretrained(plain, tmp_path / "out")
    torch.testing.assert_close(logits_of(by_peft), logits_of(model), rtol=0, atol=1e-4)
    assert not torch.allclose(before, logits_of(model), atol=1e-2)
    of_first = any("layers.0." in name and "lora" in name for name in by_peft.state_dict())
    assert of_first == (lora is not LAST)


@pytest.mark.parametrize(("kind", "lora"), [("llama", PLAIN), ("llama", LAST), ("gpt_oss", EXPERTS)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_adapters_opens_with_them_unmerged(tmp_path: Path, kind: str, lora: Lora, dtype: Any) -> None:
    base = save_base(tmp_path / "base", kind)
    save_adapters(tmp_path / "out", base, lora)
    model = with_adapters(load_causal_model(base, "cpu", dtype), lora)
    opened = load_causal_model(tmp_path / "out", "cpu", dtype)
    assert torch.equal(logits_of(opened), logits_of(model))
    assert {value.dtype for name, value in opened.named_parameters() if "lora_" in name} == {torch.float32}


def test_a_base_is_relative_to_the_folder_and_a_missing_or_adapted_one_is_named(tmp_path: Path, base: Path) -> None:
    save_adapters(tmp_path / "out", base)
    settings(tmp_path / "out", base_model_name_or_path="../base")
    assert base_folder(tmp_path / "out").resolve() == base
    assert context_window(tmp_path / "out") == context_window(base) == 256
    save_adapters(tmp_path / "second", base)
    settings(tmp_path / "second", base_model_name_or_path=str(tmp_path / "out"))
    with pytest.raises(UsageError, match="adapters of its own"):
        load_causal_model(tmp_path / "second", "cpu", "float32")
    shutil.rmtree(base)
    with pytest.raises(UsageError, match=r"need their base model, .* none at .*base.*base_model_name_or_path"):
        load_causal_model(tmp_path / "out", "cpu", "float32")


NO_MODELS = ("", ".", "..", "/", "/proc", "~nosuchuser/x", "x" * 5000, "../" * 2000, "\0", "file:///etc", "https://a/b")
NO_PACKAGES = ("package:", "package:.x", "package:this.x", "package:__main__", "package:json")


def test_a_base_that_is_no_model_is_refused_unread_and_runs_nothing(tmp_path: Path, base: Path) -> None:
    save_adapters(tmp_path / "out", base)
    for named in (*NO_MODELS, *NO_PACKAGES):
        settings(tmp_path / "out", base_model_name_or_path=named)
        for reads in (base_folder, folder_hash):
            with pytest.raises(UsageError, match=r"is no model|need their base model|adapters of its own"):
                reads(tmp_path / "out")
    assert "this" not in sys.modules


def test_a_base_on_the_hub_is_fetched_only_if_a_card_has_its_hash(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def snapshot_download(name: str, *, local_files_only: bool, **patterns: object) -> str:
        asked.append(local_files_only)
        if local_files_only:
            raise FileNotFoundError(name)
        return str(save_tiny_model(tmp_path / "fetched", seed=1))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    out = tmp_path / "out"
    save_adapters(out, base)
    settings(out, base_model_name_or_path="somebody/model")
    for load in (folder_hash, base_folder, lambda folder: load_causal_model(folder, "cpu", "float32")):
        with pytest.raises(UsageError, match=r"what no checkpoint.json has the hash of is not fetched"):
            load(out)
    card = Checkpoint(format="f", counter="c", env={}, env_hash="e", base="b")
    write_json(out / CHECKPOINT, card)
    with pytest.raises(UsageError, match="is not fetched"):
        base_folder(out)
    assert set(asked) == {True}
    write_json(out / CHECKPOINT, msgspec.structs.replace(card, adapter_base=folder_hash(base)))
    with pytest.raises(UsageError, match=r"is not the model that the adapters in .* were trained on"):
        load_causal_model(out, "cpu", "float32")
    assert asked[-1] is False


def test_the_hash_follows_adapters_and_base_and_another_base_is_refused(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    save_adapters(out, base)
    card = Checkpoint(format="f", counter="c", env={}, env_hash="e", base="b", adapter_base=folder_hash(base))
    write_json(out / CHECKPOINT, card)
    first = folder_hash(out)
    shutil.copytree(base, tmp_path / "elsewhere")
    settings(out, base_model_name_or_path=str(tmp_path / "elsewhere"))
    assert folder_hash(out) == first
    load_causal_model(out, "cpu", "float32")
    save_tiny_model(tmp_path / "elsewhere", seed=1)
    assert folder_hash(out) != first
    with pytest.raises(UsageError, match=r"is not the model that the adapters in .* were trained on"):
        load_causal_model(out, "cpu", "float32")


def test_adapters_of_other_kinds_and_damaged_files_are_refused(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    save_adapters(out, base)
    kept = (out / ADAPTER_CONFIG).read_bytes()
    for changed in ({"use_dora": True}, {"peft_type": "IA3"}, {"rank_pattern": {"q": 2}}, {"r": 0}):
        settings(out, **changed)
        with pytest.raises(UsageError, match="merge them with peft"):
            read_adapters(out)
        (out / ADAPTER_CONFIG).write_bytes(kept)
    (out / ADAPTER_WEIGHTS).write_bytes(b"torn")
    with pytest.raises(UsageError, match="is damaged"):
        read_adapters(out)
    (out / ADAPTER_CONFIG).write_text("{")
    for read in (read_adapters, base_folder, folder_hash):
        with pytest.raises(UsageError, match="not a configuration of adapters"):
            read(out)


def test_a_pipe_in_place_of_the_weights_of_adapters_is_an_error_and_is_not_waited_for(tmp_path: Path) -> None:
    settings = {"base_model_name_or_path": "base", "r": 1, "lora_alpha": 1}
    write_json(tmp_path / ADAPTER_CONFIG, settings)
    os.mkfifo(tmp_path / ADAPTER_WEIGHTS)
    with pytest.raises(UsageError, match=r"has no file adapter_model\.safetensors"):
        read_adapters(tmp_path)
