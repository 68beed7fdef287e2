"""Adapters begin as the identity, stand beside every linear layer but the head, and are merged into a plain model."""

from __future__ import annotations

import shutil
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

LORA = Lora(rank=4, alpha=8.0)
IDS = torch.arange(20)[None]
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma2", {}),
    ("phi3", {}),
)
EXPERTS = Lora(rank=4, alpha=8.0, experts=True)
KINDS_OF_MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def loaded(folder: Path, kind: str = "llama", dtype: Any = "float32", **settings: Any) -> Any:
    return load_causal_model(save_tiny_model(folder, kind, **settings), "cpu", dtype)


def mixture(folder: Path, kind: str) -> Any:
    return loaded(folder, kind, **KINDS_OF_MIXTURES.get(kind, {}))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_computes_what_it_did_before_its_adapters_are_trained(tmp_path: Path, dtype: str) -> None:
    model = loaded(tmp_path, dtype=dtype)
    before = logits_of(model)
    add_adapters(model, LORA, seed=0)
    assert torch.equal(logits_of(model), before)
    stir(model)
    assert not torch.allclose(logits_of(model), before, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_linear_layer_but_the_head_gets_one_and_nothing_else_is_trained(tmp_path: Path, dtype: str) -> None:
    model = loaded(tmp_path, dtype=dtype)
    linear = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)} - {"lm_head"}
    add_adapters(model, LORA, seed=0)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert trained.keys() == {f"{name}.{part}.weight" for name in linear for part in ("lora_A", "lora_B")}
    assert len(linear) == 14
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert {value.dtype for value in model.parameters() if not value.requires_grad} == {getattr(torch, dtype)}
    assert not any(value.any() for name, value in trained.items() if "lora_B" in name)


def test_last_layers_alone_are_adapted_where_asked_and_the_backward_pass_ends_there(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    add_adapters(model, Lora(rank=4, layers=1), seed=0)
    assert {layer_of(name) for name, _ in list_adapters(model)} == {1}
    inner: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, hidden: inner.append(hidden))
    model(input_ids=IDS)
    assert [hidden.requires_grad for hidden in inner] == [False, True]
    with pytest.raises(UsageError, match=r"has 2 layers: train\.lora\.layers=3"):
        add_adapters(loaded(tmp_path), Lora(rank=4, layers=3), seed=0)


def test_an_adapter_adds_its_scaled_product_to_its_layer(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    plain = model.model.layers[1].mlp.up_proj.weight.clone()
    add_adapters(model, LORA, seed=0)
    stir(model)
    layer = model.model.layers[1].mlp.up_proj
    hidden = torch.randn(3, 64)
    expected = hidden @ plain.T + 2.0 * hidden @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    torch.testing.assert_close(layer(hidden), expected)


def test_beginnings_are_drawn_by_the_seed_one_for_each_layer(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[Tensor]:
        model = loaded(tmp_path)
        add_adapters(model, LORA, seed)
        return [value for name, value in model.named_parameters() if "lora_A" in name]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert len({value.flatten()[0].item() for value in first}) == len(first)
    assert all(value.abs().max() <= value.shape[1] ** -0.5 for value in first)
    assert all(value.abs().mean() > 0.4 * value.shape[1] ** -0.5 for value in first)


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_plain_model_with_the_merged_weights_computes_the_same(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    model, plain = loaded(tmp_path, kind, **settings), load_causal_model(tmp_path, "cpu", "float32")
    before = logits_of(model)
    add_adapters(model, LORA, seed=0)
    stir(model)
    merged = merge_state(model)
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged, strict=True)
    torch.testing.assert_close(logits_of(plain), logits_of(model), rtol=0, atol=1e-4)
    assert not torch.allclose(logits_of(model), before, atol=1e-2)


def test_merging_leaves_the_adapted_model_as_it_is(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    add_adapters(model, LORA, seed=0)
    stir(model)
    before, merged = logits_of(model), merge_state(model)
    assert torch.equal(logits_of(model), before)
    assert all(torch.equal(merged[name], value) for name, value in merge_state(model).items())


def test_merged_weights_do_not_follow_later_steps(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    add_adapters(model, LORA, seed=0)
    merged = merge_state(model)
    kept = {name: value.clone() for name, value in merged.items()}
    stir(model)
    assert all(torch.equal(merged[name], value) for name, value in kept.items())


def test_merged_weights_keep_the_type_of_the_base(tmp_path: Path) -> None:
    model = loaded(tmp_path, dtype="bfloat16")
    add_adapters(model, LORA, seed=0)
    stir(model)
    assert {value.dtype for value in merge_state(model).values()} == {torch.bfloat16}


def test_without_adapters_the_state_is_the_models_own(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    merged, own = merge_state(model), model.state_dict()
    assert merged.keys() == own.keys()
    assert all(torch.equal(merged[name], value) for name, value in own.items())


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no linear layers .*train\.lora\.rank=0"):
        add_adapters(loaded(tmp_path, "gpt2", n_inner=96, n_positions=64), LORA, seed=0)


@pytest.mark.parametrize("kind", KINDS_OF_MIXTURES)
def test_experts_get_an_adapter_for_each_of_their_parameters(tmp_path: Path, kind: str) -> None:
    model = mixture(tmp_path, kind)
    before = logits_of(model)
    add_adapters(model, EXPERTS, seed=0)
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=1e-4)
    model(input_ids=IDS).logits.square().mean().backward()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    of_experts = {name: value for name, value in trained.items() if ".experts." in name}
    assert len(of_experts) == 2 * 2 * 2, "layers, parameters, A and B"
    assert all(value.grad is not None and value.grad.any() for name, value in of_experts.items() if "lora_B" in name)
    stir(model)
    assert not torch.allclose(logits_of(model), before, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS_OF_MIXTURES)
def test_merged_experts_compute_the_same(tmp_path: Path, kind: str) -> None:
    model = mixture(tmp_path, kind)
    plain = load_causal_model(tmp_path, "cpu", "float32")
    add_adapters(model, EXPERTS, seed=0)
    stir(model)
    plain.load_state_dict(merge_state(model), strict=True)
    torch.testing.assert_close(logits_of(plain), logits_of(model), rtol=0, atol=1e-4)


def test_a_model_without_experts_is_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no mixture of experts.*train\.lora\.experts=false"):
        add_adapters(loaded(tmp_path), EXPERTS, seed=0)


@pytest.mark.parametrize("kind", ["llama", *KINDS_OF_MIXTURES])
def test_adapters_move_between_models_and_can_be_taken_off(tmp_path: Path, kind: str) -> None:
    lora = LORA if kind == "llama" else EXPERTS
    model, other = (mixture(tmp_path, kind) for _ in range(2))
    before = logits_of(other)
    add_adapters(model, lora, seed=0)
    stir(model)
    adapters = adapters_of(model)
    assert adapters is not None
    assert adapters.lora == lora
    for _ in range(2):
        put_adapters(other, adapters)
        assert torch.equal(logits_of(other), logits_of(model))
    drop_adapters(other)
    assert adapters_of(other) is None
    assert torch.equal(logits_of(other), before)


def test_adapters_of_another_rank_take_the_place_of_present_ones(tmp_path: Path) -> None:
    model, other = loaded(tmp_path), loaded(tmp_path)
    add_adapters(model, LORA, seed=0)
    add_adapters(other, Lora(rank=2, alpha=2.0), seed=0)
    stir(model)
    adapters = adapters_of(model)
    assert adapters is not None
    put_adapters(other, adapters)
    assert torch.equal(logits_of(other), logits_of(model))


def test_adapters_of_another_model_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = loaded(tmp_path / "a", hidden_size=32)
    other = loaded(tmp_path / "b")
    before = logits_of(other)
    add_adapters(model, LORA, seed=0)
    adapters = adapters_of(model)
    assert adapters is not None
    with pytest.raises(UsageError, match="do not fit LlamaForCausalLM"):
        put_adapters(other, adapters)
    assert adapters_of(other) is None
    assert torch.equal(logits_of(other), before)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_updates_are_computed_in_float32_also_under_automatic_mixed_precision(tmp_path: Path, kind: str) -> None:
    """The update alone is compared: the weights are zeros, so that nothing hides it."""
    model = mixture(tmp_path, kind)
    add_adapters(model, LORA if kind == "llama" else EXPERTS, seed=0)
    stir(model)
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
    add_adapters(model, LORA, seed=0)
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


PLAIN, MIXTURE_LORA = Lora(rank=4, alpha=8.0), Lora(rank=4, alpha=6.0, experts=True)
LAST = Lora(rank=4, alpha=8.0, layers=1)
MIXTURES = [(kind, MIXTURE_LORA) for kind in ("gpt_oss", "qwen3_moe")]


def save_adapters(folder: Path, base: Path, lora: Lora = PLAIN) -> Any:
    """Adapters with random values in a folder; the model that has them."""
    model = load_causal_model(base, "cpu", "float32")
    add_adapters(model, lora, seed=0)
    stir(model)
    adapters = adapters_of(model)
    assert adapters is not None
    write_adapters(folder, adapters, base)
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
    [*(("llama", lora) for lora in (PLAIN, LAST)), *((kind, PLAIN) for kind in ("qwen3", "gpt_oss")), *MIXTURES],
)
def test_peft_computes_the_same_from_the_folder(tmp_path: Path, kind: str, lora: Lora) -> None:
    base = save_tiny_model(tmp_path / "base", kind, **KINDS_OF_MIXTURES.get(kind, {}))
    model = save_adapters(tmp_path / "out", base, lora)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits_of(plain)
    by_peft = PeftModel.from_pretrained(plain, tmp_path / "out")
    torch.testing.assert_close(logits_of(by_peft), logits_of(model), rtol=0, atol=1e-4)
    assert not torch.allclose(before, logits_of(model), atol=1e-2)
    assert set(by_peft.state_dict()) & {"base_model.model.lm_head.weight"}
    of_first = any("layers.0." in name and "lora" in name for name in by_peft.state_dict())
    assert of_first == (lora is not LAST)


@pytest.mark.parametrize(("kind", "lora"), [("llama", PLAIN), ("llama", LAST), ("gpt_oss", MIXTURE_LORA)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_adapters_opens_as_a_model_with_them_unmerged(
    tmp_path: Path, kind: str, lora: Lora, dtype: Any
) -> None:
    base = save_tiny_model(tmp_path / "base", kind, **KINDS_OF_MIXTURES.get(kind, {}))
    save_adapters(tmp_path / "out", base, lora)
    model = load_causal_model(base, "cpu", dtype)
    add_adapters(model, lora, seed=0)
    stir(model)
    loaded = load_causal_model(tmp_path / "out", "cpu", dtype)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert {value.dtype for name, value in loaded.named_parameters() if "lora_" in name} == {torch.float32}


def test_the_base_is_found_relative_to_the_folder_too(tmp_path: Path, base: Path) -> None:
    save_adapters(tmp_path / "out", base)
    settings(tmp_path / "out", base_model_name_or_path="../base")
    assert base_folder(tmp_path / "out").resolve() == base
    assert context_window(tmp_path / "out") == context_window(base) == 256


def test_a_missing_base_is_one_clear_error(tmp_path: Path, base: Path) -> None:
    save_adapters(tmp_path / "out", base)
    shutil.rmtree(base)
    with pytest.raises(UsageError, match=r"need their base model, .* none at .*base.*base_model_name_or_path"):
        load_causal_model(tmp_path / "out", "cpu", "float32")


def test_another_base_is_one_clear_error(tmp_path: Path, base: Path) -> None:
    save_adapters(tmp_path / "out", base)
    card = Checkpoint(format="f", counter="c", env={}, env_hash="e", base="b", adapter_base=folder_hash(base))
    write_json(tmp_path / "out" / CHECKPOINT, card)
    load_causal_model(tmp_path / "out", "cpu", "float32")
    save_tiny_model(base, seed=1)
    with pytest.raises(UsageError, match=r"is not the model that the adapters in .* were trained on"):
        load_causal_model(tmp_path / "out", "cpu", "float32")


def test_the_hash_follows_the_adapters_and_the_base_and_not_where_it_lies(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    save_adapters(out, base)
    first = folder_hash(out)
    shutil.copytree(base, tmp_path / "elsewhere")
    settings(out, base_model_name_or_path=str(tmp_path / "elsewhere"))
    assert folder_hash(out) == first
    save_tiny_model(tmp_path / "elsewhere", seed=1)
    assert folder_hash(out) != first


def test_adapters_on_adapters_are_refused(tmp_path: Path, base: Path) -> None:
    save_adapters(tmp_path / "first", base)
    save_adapters(tmp_path / "second", base)
    settings(tmp_path / "second", base_model_name_or_path=str(tmp_path / "first"))
    with pytest.raises(UsageError, match="adapters of its own"):
        load_causal_model(tmp_path / "second", "cpu", "float32")


@pytest.mark.parametrize("changed", [{"use_dora": True}, {"peft_type": "IA3"}, {"rank_pattern": {"q": 2}}, {"r": 0}])
def test_adapters_of_other_kinds_are_refused(tmp_path: Path, base: Path, changed: dict[str, Any]) -> None:
    save_adapters(tmp_path / "out", base)
    settings(tmp_path / "out", **changed)
    with pytest.raises(UsageError, match="merge them with peft"):
        read_adapters(tmp_path / "out")


def test_damaged_files_are_refused(tmp_path: Path, base: Path) -> None:
    save_adapters(tmp_path / "out", base)
    (tmp_path / "out" / ADAPTER_WEIGHTS).write_bytes(b"torn")
    with pytest.raises(UsageError, match="is damaged"):
        read_adapters(tmp_path / "out")
    (tmp_path / "out" / ADAPTER_CONFIG).write_text("{")
    for read in (read_adapters, base_folder, folder_hash):
        with pytest.raises(UsageError, match="not a configuration of adapters"):
            read(tmp_path / "out")  # type: ignore[operator]
