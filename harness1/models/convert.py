"""Conversion of a model to one plain type of numbers, which trainers and engines read: from float32, from MXFP4 (the
experts of gpt-oss: `NAME_blocks` and `NAME_scales`), or from GGUF (a Llama or Qwen2 with a byte-level BPE tokenizer),
in which transformers 5.17 mistakes the beginning of text for its end, and drops the padding token and the
pre-tokenizer. Layers can be left out. One tensor is in memory at a time, so safetensors files are written here."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from harness1.data.origins import origins_of
from harness1.errors import MissingExtra, UsageError, optional
from harness1.model_folder import CONFIG, folder_hash, holds_adapters, open_tensors, refusing
from harness1.models.gguf import GgufFile, GgufTensor
from harness1.plain import file_digest, meant
from harness1.records import Record
from harness1.runs.files import (
    STAGE,
    Stage,
    read_json,
    refuse_foreign,
    refuse_full_disk,
    refuse_other,
    remove,
    replacing,
    under_way,
    write_json,
    writing,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2"}
"""The classes of transformers, without their last part, by the names of llama.cpp."""
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BIASED = ("attn_q", "attn_k", "attn_v")  # the parts that have biases in Qwen2
SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Token types of GGUF: a control token, a text that is always one token, and a place without a token."""
QWEN2 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What llama.cpp splits at for Qwen2. Like it, the tokenizer leaves text as it is; the published one composes it (NFC)
before."""
SPLITS = ("gpt-2", "smollm", "qwen2")
"""Known pre-tokenizers: as GPT-2 did; the same after each digit was split off; by `QWEN2`."""

Facts = Mapping[str, Any]


def check_installed() -> None:
    """Raise MissingExtra before a long download if a package that the conversion needs is not installed."""
    for package in ("gguf", "safetensors", "tokenizers", "torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "train")


def convert_gguf(source: Path, folder: Path, dtype: Target = "float32") -> None:
    """Write a GGUF file as a model's folder. In bfloat16, most weights of quantized models are rounded, by up to 0.4 %.
    Raise UsageError for a file that is no GGUF or not supported, or a full disk."""
    stored = _open_gguf(source, folder, dtype)
    tensors = _plan_tensors(stored, KINDS[dtype])
    refuse_full_disk(folder, sum(each.size for each in tensors))
    with writing(folder):
        write_tensors(folder / "model.safetensors", tensors, lambda each: _load_tensor(stored, each))


class _GgufWeights(GgufFile):
    """A GGUF file that is read as an open safetensors file is."""

    def get_slice(self, name: str) -> GgufTensor:
        return self.tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        """Undo llama.cpp's order of a head's dimensions in a Llama: it rotates neighbours, transformers the halves."""
        import torch

        weight = self.tensors[name].decode()
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
        if heads is not None and self.facts["general.architecture"] == "llama":
            count = self.facts[f"llama.attention.{heads}"]
            weight = weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        return torch.from_numpy(np.ascontiguousarray(weight))


def _open_gguf(source: Path, folder: Path, dtype: Target) -> Stored:
    """Write all of a model but its weights into a folder, and return these."""
    check_installed()
    with refusing(f"{source.name} cannot be converted"):
        file = _GgufWeights(source)
        layers = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
        if layers != (named := file.facts.get(f"{file.facts['general.architecture']}.block_count", layers)):
            raise ValueError(f"it has {layers} of the {named} layers that it names")
        folder.mkdir(parents=True, exist_ok=True)
        _save_config(file.facts, folder, dtype, tied="output.weight" not in file.tensors)
        _save_tokenizer(file.facts, folder)
        return {_rename(name, file.facts): (file, name) for name in file.tensors}


def _rename(tensor: str, facts: Facts) -> str:
    """Return a tensor's name in transformers, for example for `blk.3.attn_q.weight` or `output_norm.weight`."""
    stem, _, kind = tensor.rpartition(".")
    if kind == "weight" and stem in TOP:
        return f"{TOP[stem]}.weight"
    biased = BIASED if facts["general.architecture"] == "qwen2" else ()
    match stem.split("."):
        case ["blk", layer, part] if part in (biased if kind == "bias" else PARTS) and kind in ("weight", "bias"):
            return f"model.layers.{layer}.{PARTS[part]}.{kind}"
    raise ValueError(f"it has a tensor {tensor!r}, which a plain model of its kind does not have")


def _save_config(facts: Facts, folder: Path, dtype: Target, tied: bool) -> None:
    import transformers

    library: Any = transformers
    kind = facts["general.architecture"]
    if kind not in ARCHITECTURES or any(name.startswith(f"{kind}.rope.scaling") for name in facts):
        raise ValueError("it is not a plain Llama or Qwen2")
    special = {f"{name}_id": facts.get(key) for name, key in SPECIAL.items() if name != "unk_token"}
    own = {name.removeprefix(f"{kind}."): value for name, value in facts.items()}
    heads = own["attention.head_count"]
    config = getattr(library, f"{ARCHITECTURES[kind]}Config")(
        architectures=[f"{ARCHITECTURES[kind]}ForCausalLM"],
        dtype=dtype,
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=own["embedding_length"],
        intermediate_size=own["feed_forward_length"],
        num_hidden_layers=own["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=own.get("attention.head_count_kv", heads),
        head_dim=own.get("rope.dimension_count", own["embedding_length"] // heads),
        max_position_embeddings=own["context_length"],
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)},
        tie_word_embeddings=tied,
        **special,
    )
    config.save_pretrained(folder)
    library.GenerationConfig(**special).save_pretrained(folder)


def _save_tokenizer(facts: Facts, folder: Path) -> None:
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    library: Any = transformers
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    splits = facts.get("tokenizer.ggml.pre", "gpt-2")
    if facts["tokenizer.ggml.model"] != "gpt2" or splits not in SPLITS:
        raise ValueError(f"its tokenizer is {facts['tokenizer.ggml.model']!r} with the splits {splits!r}")
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    used = {token: at for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    backend = Tokenizer(models.BPE(vocab=used, merges=merges))
    first: list[Any] = []
    if splits == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    if splits == "qwen2":
        first = [pre_tokenizers.Split(Regex(QWEN2), "isolated")]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits != "qwen2")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, to_bytes])
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=facts[f"{facts['general.architecture']}.context_length"],
        **{name: tokens[facts[key]] for name, key in SPECIAL.items() if key in facts},
    )
    tokenizer.chat_template = facts.get("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


VERB = "models convert"
CHECKED = 1 << 24  # numbers that are checked at a time, because a check takes more memory than what it checks
WEIGHTS = "*.safetensors*"
OTHERS = (".json", ".txt", ".model", ".jinja", ".md")
"""Suffixes of the files that are copied: tokenizer, chat template, licence and card."""
PACKED, SCALES = "_blocks", "_scales"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""MXFP4 (OCP Microscaling Formats 1.0): the numbers of the lower three bits; the fourth is the sign (E2M1)."""
BIAS = 127  # of its exponents, which are bytes (E8M0)
BLOCK = 32  # numbers that share an exponent, two in a byte, the lower half first
LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")
Target = Literal["bfloat16", "float16", "float32"]
KINDS: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
FLOATS = ("F64", "F32", "F16", "BF16")
BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Sizes of the types that are written, by their names in safetensors."""
ALIGNMENT = 8  # the header of a safetensors file ends at a multiple of this many bytes

Stored = Mapping[str, tuple[Any, str]]  # tensors by their names in the new model: an open file, and the name in it


class TensorInfo(NamedTuple):
    """The description of a tensor; `kind` is the name of its type in safetensors."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * BYTES[self.kind]


class Converted(Record, kw_only=True):
    """The contents of a converted model; `size` is in bytes, and `dequantized` counts the tensors that were MXFP4."""

    dtype: str
    files: int  # earlier versions wrote several
    tensors: int
    size: int
    dequantized: int


def convert_model(
    source: Path,
    out: Path,
    dtype: Target = "bfloat16",
    *,
    layers: Sequence[int] = (),
    force: bool = False,
    say: Callable[[str], None] = lambda step: None,
) -> Converted:
    """Write a model's weights in one type into a folder, with its tokenizer and its configuration, unless it is there.
    The source is a folder of safetensors, plain or MXFP4, or a GGUF file; of some `layers`, numbered from 0, only these
    are kept, in this order. Raise UsageError if there is no such type, model or layer, the numbers do not fit the type,
    or the folder holds something else, is the source, or has too little room."""
    if source.resolve() == out.resolve():
        raise UsageError(f"{out} is the model itself: choose another --out")
    if dtype not in KINDS:
        raise UsageError(f"a model is not converted to {dtype!r}: choose {', '.join(KINDS)}{meant(dtype, KINDS)}")
    with optional("train"):
        import torch  # noqa: F401
    with writing(source):
        digest = folder_hash(source) if source.is_dir() else file_digest(source)
    inputs = {"model": digest, "dtype": dtype, **({"layers": [*layers]} if layers else {})}
    stage = Stage(VERB, inputs, origins=origins_of(source))
    if not force and stage.is_done(out):
        return msgspec.convert(read_json(out / STAGE)["outputs"], Converted)
    refuse_foreign(out, VERB) if force else refuse_other(stage, out, "model")
    with ExitStack() as stack:
        folder = source
        if not source.is_dir():
            with writing(out):
                out.parent.mkdir(parents=True, exist_ok=True)
                beside = TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
                folder = Path(stack.enter_context(beside))
                stored = _open_gguf(source, folder, dtype)
        elif holds_adapters(folder):
            raise UsageError(f"{folder} holds adapters, not a whole model: merge them first")
        else:
            stored = {name: (file, name) for name, file in open_tensors(folder, stack).items()}
        config = _plain_config(folder, dtype)
        if layers:
            config, stored = _keep_layers(config, stored, layers)
        tensors = _plan_tensors(stored, KINDS[dtype])
        size = sum(each.size for each in tensors)
        refuse_full_disk(out, size)
        with under_way(stage, out):
            remove(out, WEIGHTS, keep_card=True)
            say(f"writing {len(tensors)} tensors, {size / 1e9:.1f} GB")
            write_tensors(out / "model.safetensors", tensors, lambda each: _load_tensor(stored, each))
            for path in sorted(folder.iterdir()):  # the tokenizer and the other small files
                known = path.suffix in OTHERS and not path.match("*.index.json") and path.name not in (CONFIG, STAGE)
                if path.is_file() and known:
                    shutil.copyfile(path, out / path.name)
            write_json(out / CONFIG, config)
            packed = sum(each.name + PACKED in stored for each in tensors)
            made = Converted(dtype=dtype, files=1, tensors=len(tensors), size=size, dequantized=packed)
            stage.write(out, status="finished", outputs=msgspec.to_builtins(made))
    return made


def _plain_config(folder: Path, dtype: str) -> dict[str, Any]:
    with refusing(f"{folder} has no readable {CONFIG}"):
        config = read_json(folder / CONFIG)
    method = (config.pop("quantization_config", None) or {"quant_method": "mxfp4"}).get("quant_method")
    if method != "mxfp4":
        raise UsageError(f"{folder} is quantized as {method}: only MXFP4 can be converted")
    config.pop("torch_dtype", None)  # the name that the setting once had
    return config | {"dtype": dtype}


def _keep_layers(config: dict[str, Any], stored: Stored, layers: Sequence[int]) -> tuple[dict[str, Any], Stored]:
    count = config.get("num_hidden_layers", 0)
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise UsageError(f"the model has {count} layers, numbered from 0, and no layer {wrong[0]}")
    config = config | {"num_hidden_layers": len(layers)}
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    kept: dict[str, tuple[Any, str]] = {}
    for name, tensor in stored.items():
        if found := LAYER.fullmatch(name):
            begin, layer, rest = found.groups()
            kept |= {f"{begin}{place}{rest}": tensor for place, each in enumerate(layers) if each == int(layer)}
        else:
            kept[name] = tensor
    return config, kept


def _plan_tensors(stored: Stored, kind: str) -> list[TensorInfo]:
    slices, planned = {name: file.get_slice(own) for name, (file, own) in stored.items()}, []
    shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
    for name in sorted(stored):
        found, shape, whole = slices[name].get_dtype(), shapes[name], name.removesuffix(PACKED)
        if whole != name and found == "U8":
            *experts, outputs, groups, _ = shape
            if shapes.get(whole + SCALES) != shape[:-1] or 2 * shape[-1] != BLOCK:
                raise UsageError(f"{name} has no {SCALES[1:]} of its shape")
            planned.append(TensorInfo(whole, kind, (*experts, groups * BLOCK, outputs)))
        elif not name.endswith(SCALES) or name.removesuffix(SCALES) + PACKED not in stored:
            if found not in BYTES:
                raise UsageError(f"{name} is of the type {found}, which cannot be converted")
            planned.append(TensorInfo(name, kind if found in FLOATS else found, shape))
    return planned


def _load_tensor(stored: Stored, wanted: TensorInfo) -> Tensor:
    import torch

    target = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}.get(wanted.kind)
    name = wanted.name
    if name in stored:
        file, own = stored[name]
        value: Tensor = file.get_tensor(own)
        value = value if target is None else value.to(target)
    else:
        blocks, scales = (stored[name + end][0].get_slice(stored[name + end][1]) for end in (PACKED, SCALES))
        value = torch.empty(wanted.shape, dtype=target)
        matrices = value if value.dim() > 2 else value[None]
        for at, matrix in enumerate(matrices):
            one = at if value.dim() > 2 else slice(None)
            matrix.copy_(dequantize(blocks[one], scales[one], matrix.dtype))
    parts = torch.split(value.reshape(-1), CHECKED)
    if target is not None and not all(bool(torch.isfinite(part).all()) for part in parts):
        raise UsageError(f"{name} has numbers that are not finite in {str(target).removeprefix('torch.')}")
    return value


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an MXFP4 matrix as models multiply with it, [inputs, outputs], from the bytes of its blocks, [outputs,
    inputs / 32, 16], and of their exponents, [outputs, inputs / 32]; exact in bfloat16 and float32."""
    import torch

    signed = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], dim=-1)  # [byte, half]
    numbers = pairs[blocks.int()].flatten(-2) * torch.exp2(scales.float() - BIAS).unsqueeze(-1)
    return numbers.flatten(-2).T.to(dtype).contiguous()


def write_tensors(path: Path, tensors: Sequence[TensorInfo], load: Callable[[TensorInfo], Tensor]) -> None:
    """Write a safetensors file: size of the header, header as JSON, tensors, each loaded once, in order."""
    import torch

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        begin, end = end, end + each.size
        header[each.name] = {"dtype": each.kind, "shape": each.shape, "data_offsets": (begin, end)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    with replacing(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for each in tensors:
            value = load(each)
            assert tuple(value.shape) == each.shape, f"{each.name} has the shape {tuple(value.shape)}"
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del value  # before the next is loaded
