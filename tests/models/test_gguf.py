"""A model in a file of llama.cpp is the same model in a folder of transformers."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from gguf import dequantize as dequantize_by_gguf
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from harness1.errors import MissingExtra, UsageError
from harness1.models.convert import BIASED, PARTS, TOP, convert_gguf, convert_model
from harness1.models.fetch import GGUF, find_bundled, home_of, is_fetched
from tests.tiny_models import save_tiny_model

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS, WIDTH, LAYERS, WINDOW = 4, 2, 64, 2, 96
PRE = {"llama": "smollm", "qwen2": "qwen2"}


def byte_letters() -> list[str]:
    """The letters that stand for the bytes 0 to 255 in byte-level BPE: printable ones for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


LETTERS = byte_letters()
SPACE = LETTERS[32]
MERGES = ["h e", "l l", f"{SPACE} {SPACE}", f"{SPACE} h", "! h", "5 5"]
TOKENS = [*CONTROLS, *LETTERS, *(merge.replace(" ", "") for merge in MERGES), "[PAD0]"]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> PreTrainedModel:
    settings = {"vocab_size": len(TOKENS), "max_position_embeddings": WINDOW, "tie_word_embeddings": True}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "initializer_range": 0.5}
    saved = save_tiny_model(tmp_path_factory.mktemp("model"), request.param, **settings, **rope)
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(saved).eval()
    for name, bias in made.named_parameters():
        if name.endswith(".bias"):  # which begin as zeros
            torch.nn.init.normal_(bias)
    return made


def rows_of_llama_cpp(name: str, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Dimension i and i + half of a head become neighbours."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
    if heads is None:
        return weight
    size = len(weight) // heads
    order = [head * size + at + half * size // 2 for head in range(heads) for at in range(size // 2) for half in (0, 1)]
    return weight[order]


def written(path: Path, model: PreTrainedModel, quantized: bool = False, **changes: Any) -> Path:
    kind = model.config.model_type
    writer = GGUFWriter(path, changes.get("architecture", kind))
    kinds = [3] * len(CONTROLS) + [1] * (len(TOKENS) - len(CONTROLS) - 1) + [5]
    facts: dict[str, Any] = {
        "context_length": WINDOW,
        "embedding_length": WIDTH,
        "block_count": changes.get("blocks", LAYERS),
    }
    facts |= {"feed_forward_length": 96, "head_count": HEADS, "head_count_kv": KV_HEADS, "layer_norm_rms_eps": 1e-6}
    facts |= {"rope_freq_base": 5000.0, "tokenizer_model": "gpt2", "tokenizer_pre": changes.get("pre", PRE[kind])}
    facts |= {"token_list": TOKENS, "token_types": kinds, "token_merges": MERGES, "chat_template": TEMPLATE}
    facts |= {f"{name}_token_id": number for number, name in enumerate(("unk", "bos", "eos"))} | {"pad_token_id": 2}
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    state = model.state_dict()
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in TOP.items() if ours != "output"}
    for layer in range(LAYERS):
        names |= {f"blk.{layer}.{own}.weight": f"model.layers.{layer}.{other}.weight" for own, other in PARTS.items()}
        if kind == "qwen2":
            names |= {f"blk.{layer}.{own}.bias": f"model.layers.{layer}.{PARTS[own]}.bias" for own in BIASED}
    for name, parameter in names.items():
        weight = state[parameter].numpy()
        if kind == "llama":
            weight = np.ascontiguousarray(rows_of_llama_cpp(name.split(".")[-2], weight))
        if quantized and weight.ndim == 2:
            q4_1 = GGMLQuantizationType.Q4_1
            writer.add_tensor(name, quantize(weight, q4_1), raw_dtype=q4_1)
        else:
            writer.add_tensor(name, weight)
    if "tensor" in changes:
        writer.add_tensor(changes["tensor"], np.zeros(4, dtype=changes.get("dtype", np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    convert_gguf(written(place / "tiny.gguf", model), place / "model")
    return place / "model"


def test_the_converted_model_has_the_logits_of_the_original(model: PreTrainedModel, folder: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.randint(0, len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    assert found.dtype == torch.float32
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert (found.config.eos_token_id, found.config.pad_token_id, found.config.bos_token_id) == (2, 2, 1)
    assert found.generation_config.eos_token_id == 2
    found.save_pretrained(folder.with_name("saved"))


def test_quantized_weights_keep_their_values(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness1.models.gguf.ROWS", 7)
    convert_gguf(written(tmp_path / "tiny.gguf", model, quantized=True), tmp_path / "model")
    found, kind = load_file(tmp_path / "model" / "model.safetensors"), GGMLQuantizationType.Q4_1
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        expected = torch.tensor(dequantize_by_gguf(quantize(model.state_dict()[name].numpy(), kind), kind))
        assert torch.equal(found[name], expected)
        assert not torch.equal(expected, expected.bfloat16().float())


def test_special_tokens_window_and_template_survive(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == {token: at for at, token in enumerate(TOKENS[:-1])}
    special = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (0, 1, 2, 2)
    assert tokenizer.model_max_length == WINDOW
    ids = tokenizer("<|im_start|>a<|im_end|><file_sep>").input_ids
    assert ids == [1, TOKENS.index("a"), 2, 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"
    for text in ("hello  there", " x , y ! '", "né 日本 🙂\r\n\t", "▁ <0x41> \x00", "in 2024  7", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "a  5", ["a", SPACE + SPACE, "5"]),
        ("gpt-2", "a  5", ["a", SPACE, SPACE, "5"]),
        ("gpt-2", "!h55", ["!", "h", "55"]),
        ("qwen2", "!h55", ["!h", "5", "5"]),
        ("qwen2", "e\u0301", [LETTERS[byte] for byte in b"e\xcc\x81"]),
    ],
)
def test_text_is_split_as_the_file_says(
    model: PreTrainedModel, tmp_path: Path, pre: str, text: str, tokens: list[str]
) -> None:
    convert_gguf(written(tmp_path / "a.gguf", model, pre=pre), tmp_path / "model")
    assert Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode(text).tokens == tokens


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "mamba"}, "plain Llama or Qwen2"),
        ({"pre": "qwen3"}, "qwen3"),
        ({"blocks": 1 << 30}, f"2 of the {1 << 30} layers"),
        ({"tensor": "rope_freqs.weight"}, "rope_freqs"),
        ({"tensor": "blk.0.attn_output.bias"}, "attn_output.bias"),
        ({"tensor": "output.weight", "dtype": np.int8}, "I8 is not yet implemented"),
    ],
)
def test_rejects_files_that_it_does_not_support(
    model: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        convert_gguf(written(tmp_path / "odd.gguf", model, **changes), tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_a_file_that_is_cut_short_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.gguf", model).read_bytes()
    for size in (20, 3000, len(whole) - 5):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(UsageError, match="cut short"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "model")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"\[train\]"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "model")


def test_a_file_is_converted_to_another_type_and_leaves_nothing_beside(model: PreTrainedModel, tmp_path: Path) -> None:
    source = written(tmp_path / "model.gguf", model)
    made = convert_model(source, tmp_path / "out" / "model", "bfloat16")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    convert_gguf(source, tmp_path / "float32")
    rounded, exact = (load_file(at / "model.safetensors") for at in (tmp_path / "out" / "model", tmp_path / "float32"))
    assert rounded.keys() == exact.keys()
    assert made.tensors == len(exact)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    with pytest.raises(UsageError, match="No such file"):
        convert_model(tmp_path / "missing.gguf", tmp_path / "missing")


SCRIPTS = (
    *((0x0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1E00, 0x1EFF)),
    *((0x2000, 0x206F), (0x2150, 0x218F), (0x2460, 0x24FF), (0x2600, 0x27BF), (0x3040, 0x30FF), (0x4E00, 0x9FFF)),
    *((0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFE00, 0xFE0F), (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F1E6, 0x1F1FF)),
    *((0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0x1, 0x10FFFF)),
)
SPACES = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff\u180e"
HARD = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|im_start"),
    *(
        "< |im_end|>",
        "<|IM_START|>",
        "[PAD151665]",
        "def f(x):\n    return x[1:]\n",
        "x=>{a[0]++;}",
        "#include <a.h>\r\n",
    ),
    *("\n\n\n\t\tif (!x) {", "'s", "'S", "'\u017f", "'LL", "'re", "\u2019s", "don't", "I'VE", '{"a": [1, 2.50]}'),
    *("\ufb01", "Zürich", "STRASSE", "\u0130stanbul", "\u01c5", "\u1112\u1161\u11ab", "👩\u200d💻", "👍🏽", "❤\ufe0f"),
    "1\ufe0f\u20e3",
)


def piece(dice: random.Random) -> str:
    """A few characters of one kind that tokenizers read differently; only of the Unicode that all know."""
    kind = dice.randrange(6)
    if kind == 0:
        return dice.choice(HARD)
    if kind == 1:
        return "".join(dice.choices(SPACES, k=dice.randint(1, 6)))
    if kind == 2:
        return "".join(dice.choices("0123456789\u0663\u0967½²Ⅷ①", k=dice.randint(1, 8)))
    if kind == 3:
        return dice.choice("aeiouAn가あ") + "".join(chr(dice.randint(0x300, 0x36F)) for _ in range(dice.randint(1, 3)))
    if kind == 4:
        return dice.choice(" !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") * dice.randint(1, 5)
    some = (chr(dice.randint(*dice.choice(SCRIPTS))) for _ in range(dice.randint(1, 8)))
    return "".join(each for each in some if unicodedata.category(each) not in ("Cn", "Cs"))


@pytest.fixture(scope="module", params=["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def fetched_model(request: pytest.FixtureRequest) -> Path:
    folder = home_of(find_bundled(request.param))
    if shutil.which("llama-server") is None or not is_fetched(find_bundled(request.param)):
        pytest.skip(f"llama.cpp is not installed, or {request.param} was not fetched")
    return folder


@pytest.fixture(scope="module")
def llama_cpp(fetched_model: Path) -> Iterator[httpx.Client]:
    """A server of llama.cpp on the file beside a model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("llama-server", "-m", fetched_model / GGUF, "--port", str(port), "-t", "1", "-c", "1024", "-np", "1")
    with (
        subprocess.Popen([*words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client,
    ):
        try:
            until = time.monotonic() + 120
            while server.poll() is None and time.monotonic() < until:
                with suppress(httpx.TransportError):
                    if client.get("/health").is_success:
                        break
                time.sleep(0.1)
            yield client
        finally:
            server.terminate()


@pytest.mark.service
def test_ids_are_those_of_llama_cpp(fetched_model: Path, llama_cpp: httpx.Client) -> None:
    tokenizer, dice = Tokenizer.from_file(str(fetched_model / "tokenizer.json")), random.Random("hard")
    for _ in range(10_000):
        text = "".join(piece(dice) for _ in range(dice.randint(1, 12)))
        asked = {"content": text, "parse_special": True, "add_special": False}
        assert tokenizer.encode(text).ids == llama_cpp.post("/tokenize", json=asked).json()["tokens"], ascii(text)


@pytest.mark.service
def test_the_distribution_is_nearly_that_of_llama_cpp(fetched_model: Path, llama_cpp: httpx.Client) -> None:
    tokenizer = Tokenizer.from_file(str(fetched_model / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(fetched_model, dtype=torch.float32).eval()
    text = "<|im_start|>user\nWhat does Ada Lovelace's first program compute?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text + Path(__file__).read_text()).ids
    losses = []
    for length in (21, 60, 120):
        asked = {"prompt": ids[:length], "n_predict": 1, "n_probs": model.config.vocab_size, "temperature": 1.0}
        said = llama_cpp.post("/completion", json=asked | {"samplers": []}).json()["completion_probabilities"][0]
        theirs = torch.zeros(model.config.vocab_size)
        for each in said["top_logprobs"]:
            theirs[each["id"]] = each["logprob"]
        with torch.no_grad():
            ours = model(torch.tensor([ids[:length]])).logits[0, -1].log_softmax(-1)
        losses.append(float((ours.exp() * (ours - theirs)).sum()))
    assert max(losses) < 0.02, "of 29 contexts, the 0.5B had a KL divergence of 0.001 on average, and 0.009 at most"
