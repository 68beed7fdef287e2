"""A converted model is the same model, in numbers that can be trained."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from harness1.errors import UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.convert import TensorInfo, convert_model, dequantize, write_tensors
from harness1.models.weight_gate import weight_shapes
from harness1.runs.files import read_json, write_json
from tests.tiny_models import VOCABULARY, save_byte_tokenizer, save_tiny_model

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 8}
IDS = torch.arange(24)[None] % VOCABULARY


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss with random experts in MXFP4, as the published one stores them, in two files."""
    folder = tmp_path_factory.mktemp("packed")
    save_tiny_model(save_byte_tokenizer(folder), "gpt_oss", **MOE)
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    noise = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=noise)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=noise)
    (folder / "model.safetensors").unlink()
    scales = {name: value for name, value in tensors.items() if name.endswith("_scales")}
    places = dict[str, str]()
    for at, part in enumerate(({name: tensors[name] for name in tensors.keys() - scales.keys()}, scales), 1):
        name = f"model-0000{at}-of-00002.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    config = read_json(folder / "config.json")
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    write_json(folder / "config.json", config | {"quantization_config": quantization, "dtype": "bfloat16"})
    return folder


def logits(folder: Path, dtype: str) -> torch.Tensor:
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_at_every_scale_is_the_number_that_transformers_reads(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0]
    assert torch.equal(dequantize(blocks[0], scales[0], dtype).view(torch.uint8), expected.view(torch.uint8))


def test_a_packed_model_computes_the_same_after_its_conversion(packed: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    made = convert_model(packed, plain)
    assert (made.dtype, made.dequantized) == ("bfloat16", 4)
    assert read_json(plain / "stage.json")["origins"] == [f"unknown:{packed.name}"]
    assert torch.equal(logits(plain, "bfloat16"), logits(packed, "bfloat16"))
    assert "quantization_config" not in read_json(plain / "config.json")
    values = load_file(plain / "model.safetensors").values()
    assert {value.dtype for value in values} == {torch.bfloat16}
    assert (made.tensors, made.size) == (len(values), sum(value.nbytes for value in values))
    assert (plain / "tokenizer.json").read_bytes() == (packed / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in plain.glob("*.safetensors*")) == ["model.safetensors"]
    load_causal_model(plain, "cpu", "bfloat16")


def test_plain_weights_are_rounded_once_and_come_back_equal(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "float32")
    convert_model(source, tmp_path / "bfloat16", "bfloat16")
    convert_model(tmp_path / "bfloat16", tmp_path / "back", "float32")
    places = (source, tmp_path / "bfloat16", tmp_path / "back")
    known, rounded, back = (load_file(folder / "model.safetensors") for folder in places)
    assert known.keys() == rounded.keys() == back.keys()
    for name, value in known.items():
        assert torch.equal(rounded[name], value.bfloat16())
        assert torch.equal(back[name], value.bfloat16().float())
    assert read_json(tmp_path / "back" / "config.json")["dtype"] == "float32"


def test_some_layers_alone_are_a_model_that_computes_what_they_compute(packed: Path, tmp_path: Path) -> None:
    """The reference is the whole model, cut in memory."""
    source = save_tiny_model(tmp_path / "whole", num_hidden_layers=12)
    convert_model(source, tmp_path / "short", "float32", layers=(0, 3, 11))
    library: Any = AutoModelForCausalLM
    whole = library.from_pretrained(source)
    whole.model.layers = torch.nn.ModuleList([whole.model.layers[at] for at in (0, 3, 11)])
    with torch.no_grad():
        expected = whole(IDS, use_cache=False).logits
    assert torch.equal(expected, logits(tmp_path / "short", "float32"))
    names = weight_shapes(tmp_path / "short")
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2"}
    made = convert_model(packed, tmp_path / "one", layers=(1,))
    config = read_json(tmp_path / "one" / "config.json")
    kinds = read_json(packed / "config.json")["layer_types"]
    assert (made.dequantized, config["num_hidden_layers"], config["layer_types"]) == (2, 1, kinds[1:])
    load_causal_model(tmp_path / "one", "cpu", "bfloat16")


def test_the_same_conversion_is_not_done_twice_and_another_is_refused(packed: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "plain", list[str]()
    first = convert_model(packed, out, say=said.append)
    assert convert_model(packed, out, say=said.append) == first
    assert len(said) == 1
    with pytest.raises(UsageError, match="another model"):
        convert_model(packed, out, "float32")
    assert convert_model(packed, out, "float32", force=True).dtype == "float32"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        convert_model(packed, tmp_path / "mine")
    with pytest.raises(UsageError, match="the model itself"):
        convert_model(out, out, force=True)


def test_a_conversion_that_was_cut_short_is_done_again_without_its_remains(packed: Path, tmp_path: Path) -> None:
    def stop(step: str) -> None:
        (tmp_path / "plain" / "model-00001-of-00002.safetensors").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_model(packed, tmp_path / "plain", say=stop)
    convert_model(packed, tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").glob("*.safetensors*")] == ["model.safetensors"]


def test_rejects_what_does_not_fit_or_cannot_be_read(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    with pytest.raises(UsageError, match="2 layers, numbered from 0, and no layer 2"):
        convert_model(save_tiny_model(tmp_path / "whole"), out, layers=(0, 2))

    def refused(match: str, dtype: Any = "bfloat16") -> None:
        with pytest.raises(UsageError, match=match):
            convert_model(source, out, dtype, force=True)

    refused(r"needs config\.json and safetensors")
    write_json(source / "config.json", {})
    for tensor, match in (
        ({"a": torch.tensor([1e9])}, "a has numbers that are not finite in float16"),
        ({"a_blocks": torch.zeros(2, 1, 16, dtype=torch.uint8)}, "a_blocks has no scales of its shape"),
        ({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, "a is of the type F8_E4M3"),
    ):
        save_file(tensor, source / "model.safetensors")
        refused(match, "float16")
    refused("not converted to 'float61'.*did you mean float16", "float61")
    write_json(source / "config.json", {"quantization_config": {"quant_method": "fp8"}})
    refused("quantized as fp8")
    write_json(tmp_path / "config.json", {})
    write_json(source / "adapter_config.json", {"base_model_name_or_path": str(tmp_path)})
    refused("merge them first")


def test_numbers_that_are_not_weights_stay_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_json(source / "config.json", {"torch_dtype": "float32"})
    values = {"steps": torch.tensor(7), "flags": torch.tensor([True, False]), "a_blocks": torch.ones(3)}
    save_file(values, source / "model.safetensors")
    made = convert_model(source, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert (found["steps"].dtype, found["steps"].item(), found["flags"].tolist()) == (torch.int64, 7, [True, False])
    assert found["a_blocks"].dtype == torch.bfloat16
    assert made.dequantized == 0
    assert read_json(tmp_path / "out" / "config.json") == {"dtype": "bfloat16"}


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    loaded: list[weakref.ref[torch.Tensor]] = []

    def load(wanted: TensorInfo) -> torch.Tensor:
        assert not [each for each in loaded if each() is not None]
        value = torch.full(wanted.shape, float(len(loaded)))
        loaded.append(weakref.ref(value))
        return value

    wanted = [TensorInfo(f"{at}", "F32", (3, at)) for at in range(6)]
    write_tensors(tmp_path / "some.safetensors", wanted, load)
    found = load_file(tmp_path / "some.safetensors")
    assert list(map(weakref.ref.__call__, loaded)) == [None] * 6
    assert all(torch.equal(found[str(at)], torch.full((3, at), float(at))) for at in range(6))
