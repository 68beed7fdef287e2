"""Folders of adapters: peft reads them, `hf:FOLDER` opens them, and only their own base will do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from harness1.config import Lora
from harness1.errors import UsageError
from harness1.model_folder import ADAPTER_CONFIG, base_folder, folder_hash
from harness1.models.adapters import ADAPTER_WEIGHTS, adapters_of, add_adapters, read_adapters, write_adapters
from harness1.models.causal_model import context_window, load_causal_model
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.runs.files import write_json
from tests.models.test_adapters import KINDS_OF_MIXTURES, logits_of, stir
from tests.tiny_models import save_tiny_model

PLAIN, EXPERTS = Lora(rank=4, alpha=8.0), Lora(rank=4, alpha=6.0, experts=True)
LAST = Lora(rank=4, alpha=8.0, layers=1)
MIXTURES = [(kind, EXPERTS) for kind in ("gpt_oss", "qwen3_moe")]


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


@pytest.mark.parametrize(("kind", "lora"), [("llama", PLAIN), ("llama", LAST), ("gpt_oss", EXPERTS)])
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
