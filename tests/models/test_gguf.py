"""A GGUF file becomes a folder whose model and tokenizer are those of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from harness1.errors import MissingExtra, UsageError
from harness1.models.convert import convert_model
from harness1.models.gguf import BLOCK, TOP, convert_gguf

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
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


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
    writer.add_context_length(WINDOW)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROLS) + [1] * (len(TOKENS) - len(CONTROLS)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in TOP.items() if ours != "output"}
    for layer in range(LAYERS):
        names |= {f"blk.{layer}.{own}.weight": f"model.layers.{layer}.{other}.weight" for own, other in BLOCK.items()}
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
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    kind = GGMLQuantizationType.Q4_1
    for name in ("model.embed_tokens", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj"):
        weight = llama.get_parameter(f"{name}.weight").detach().numpy()
        expected = dequantize(quantize(weight, kind), kind)
        assert np.array_equal(model.get_parameter(f"{name}.weight").detach().numpy(), expected)
        assert not torch.equal(torch.tensor(expected), torch.tensor(expected).bfloat16().float())


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


def test_digits_are_cut_out_before_words_where_the_file_says_so(
    folder: Path, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
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
def test_what_it_does_not_know_is_refused(
    llama: LlamaForCausalLM, tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        convert_gguf(written(tmp_path / "odd.gguf", llama, **changes), tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("data", [b"", b"GGUF", b"not one at all"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(UsageError, match="cannot be converted"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path / "model")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"\[train\]"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "model")


def test_a_file_is_converted_to_another_type_and_leaves_nothing_beside(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    source = written(tmp_path / "model.gguf", llama)
    made = convert_model(source, tmp_path / "out" / "model", "bfloat16")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    convert_gguf(source, tmp_path / "float32")
    rounded, exact = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out" / "model", tmp_path / "float32")
    )
    assert rounded.keys() == exact.keys()
    assert made.tensors == len(exact)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    with pytest.raises(UsageError, match="No such file"):
        convert_model(tmp_path / "missing.gguf", tmp_path / "missing")
