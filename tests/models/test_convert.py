"""A converted model is the same model, in numbers that can be trained."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from harness1.errors import MissingExtra, UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.convert import PARTS, TOP, TensorInfo, convert_gguf, convert_model, dequantize, write_tensors
from harness1.models.token_server import weight_shapes
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


CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS, WIDTH, LAYERS, WINDOW = 4, 2, 64, 2, 96


def byte_letters() -> list[str]:
    """The letters that stand for the bytes 0 to 255 in byte-level BPE: printable ones for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


LETTERS = byte_letters()
SPACE = LETTERS[32]
MERGES = ["h e", "l l", f"{SPACE} {SPACE}", f"{SPACE} h"]
TOKENS = [*CONTROLS, *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    settings = {"vocab_size": len(TOKENS), "max_position_embeddings": WINDOW, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    saved = save_tiny_model(tmp_path_factory.mktemp("llama"), **settings, rope_parameters=rope, initializer_range=0.5)
    return LlamaForCausalLM.from_pretrained(saved).eval()


def rows_of_llama_cpp(name: str, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Dimension i and i + half of a head become neighbours."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
    if heads is None:
        return weight
    size = len(weight) // heads
    order = [head * size + at + half * size // 2 for head in range(heads) for at in range(size // 2) for half in (0, 1)]
    return weight[order]


def written(path: Path, model: LlamaForCausalLM, quantized: bool = False, **changes: Any) -> Path:
    writer = GGUFWriter(path, changes.get("architecture", "llama"))
    kinds = [3] * len(CONTROLS) + [1] * (len(TOKENS) - len(CONTROLS))
    facts: dict[str, Any] = {"context_length": WINDOW, "embedding_length": WIDTH, "block_count": LAYERS}
    facts |= {"feed_forward_length": 96, "head_count": HEADS, "head_count_kv": KV_HEADS, "layer_norm_rms_eps": 1e-6}
    facts |= {"rope_freq_base": 5000.0, "tokenizer_model": "gpt2", "tokenizer_pre": changes.get("pre", "smollm")}
    facts |= {"token_list": TOKENS, "token_types": kinds, "token_merges": MERGES, "chat_template": TEMPLATE}
    facts |= {f"{name}_token_id": number for number, name in enumerate(("unk", "bos", "eos"))} | {"pad_token_id": 2}
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    state = model.state_dict()
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in TOP.items() if ours != "output"}
    for layer in range(LAYERS):
        names |= {f"blk.{layer}.{own}.weight": f"model.layers.{layer}.{other}.weight" for own, other in PARTS.items()}
    for name, parameter in names.items():
        weight = np.ascontiguousarray(rows_of_llama_cpp(name.split(".")[-2], state[parameter].numpy()))
        if quantized and weight.ndim == 2:
            kind = GGMLQuantizationType.Q4_1
            writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    if "tensor" in changes:
        writer.add_tensor(changes["tensor"], np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    convert_gguf(written(place / "tiny.gguf", llama), place / "model")
    return place / "model"


def test_the_converted_model_has_the_logits_of_the_original(llama: LlamaForCausalLM, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.randint(0, len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, llama(ids).logits)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id) == (2, 2, 1)
    assert model.generation_config.eos_token_id == 2
    model.save_pretrained(folder.with_name("saved"))


def test_quantized_weights_keep_their_values(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    from gguf import dequantize

    convert_gguf(written(tmp_path / "tiny.gguf", llama, quantized=True), tmp_path / "model")
    found, kind = load_file(tmp_path / "model" / "model.safetensors"), GGMLQuantizationType.Q4_1
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        expected = torch.tensor(dequantize(quantize(llama.state_dict()[name].numpy(), kind), kind))
        assert torch.equal(found[name], expected)
        assert not torch.equal(expected, expected.bfloat16().float())


def test_special_tokens_window_and_template_survive(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == {token: at for at, token in enumerate(TOKENS)}
    special = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (0, 1, 2, 2)
    assert tokenizer.model_max_length == WINDOW
    ids = tokenizer("<|im_start|>a<|im_end|><file_sep>").input_ids
    assert ids == [1, TOKENS.index("a"), 2, 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("text", ["hello  there", " x , y ! '", "né 日本 🙂\r\n\t", "▁ <0x41> \x00", "in 2024  7", ""])
def test_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_cut_out_where_the_file_says_so(folder: Path, llama: LlamaForCausalLM, tmp_path: Path) -> None:
    convert_gguf(written(tmp_path / "plain.gguf", llama, pre="gpt-2"), tmp_path / "plain")
    digits, plain = (AutoTokenizer.from_pretrained(place) for place in (folder, tmp_path / "plain"))
    two = TOKENS.index(SPACE + SPACE)
    assert digits("a  5").input_ids[1:] == [two, TOKENS.index("5")]
    assert plain("a  5").input_ids[1:] == [TOKENS.index(SPACE)] * 2 + [TOKENS.index("5")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "mamba"}, "plain Llama"),
        ({"pre": "qwen2"}, "qwen2"),
        ({"tensor": "rope_freqs.weight"}, "rope_freqs"),
        ({"tensor": "blk.0.attn_q.bias"}, "attn_q.bias"),
    ],
)
def test_rejects_files_that_it_does_not_support(
    llama: LlamaForCausalLM, tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        convert_gguf(written(tmp_path / "odd.gguf", llama, **changes), tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"\[train\]"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "model")


def test_a_file_is_converted_to_another_type_and_leaves_nothing_beside(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    source = written(tmp_path / "model.gguf", llama)
    made = convert_model(source, tmp_path / "out" / "model", "bfloat16")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    convert_gguf(source, tmp_path / "float32")
    rounded, exact = (load_file(at / "model.safetensors") for at in (tmp_path / "out" / "model", tmp_path / "float32"))
    assert rounded.keys() == exact.keys()
    assert made.tensors == len(exact)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    with pytest.raises(UsageError, match="No such file"):
        convert_model(tmp_path / "missing.gguf", tmp_path / "missing")
