"""Conversion of a GGUF file (a Llama with a byte-level BPE tokenizer) to a folder that `transformers` loads, which
itself mistakes the beginning of text for its end and drops the padding token and the pre-tokenizer (5.17)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness1.errors import MissingExtra, UsageError
from harness1.model_folder import refusing

Array = np.ndarray[Any, np.dtype[np.float32]]
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
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
SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF: a control token, and a text that is always one token."""
SPLITS_DIGITS = {"gpt-2": False, "smollm": True}
"""Known pre-tokenizers. All split as GPT-2 did; those set to True first split off each digit."""

Facts = Mapping[str, Any]


def check_installed() -> None:
    """Raise MissingExtra before a long download if a package that the conversion needs is not installed."""
    for package in ("gguf", "safetensors", "tokenizers", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "train")


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file as a model's folder, in fp32: bf16 would round most weights in Q4_1 and Q8_0 by up to 0.4 %.
    Raise UsageError for a file that is no GGUF or not supported, or a full disk."""
    check_installed()
    from gguf import GGUFReader, dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with refusing(f"{source.name} cannot be converted"):
        reader = GGUFReader(source)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        names = {tensor.name: _rename(tensor.name) for tensor in reader.tensors}
        folder.mkdir(parents=True, exist_ok=True)
        _save_config(facts, folder, tied="output.weight" not in names)
        _save_tokenizer(facts, folder)
        values = ((tensor.name, dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors)
        weights = {names[name]: _unpermute(name, value, facts) for name, value in values}
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # raised for all errors of the file system
        raise UsageError(f"cannot write the weights of {source.name}: {error}") from error
    (folder / "model.safetensors").chmod(0o644)  # written readable by its owner alone, but caches may be shared


def _rename(tensor: str) -> str:
    """Return a tensor's name in `LlamaForCausalLM`, for example for `blk.3.attn_q.weight` or `output_norm.weight`."""
    stem, _, kind = tensor.rpartition(".")
    if kind == "weight" and stem in TOP:
        return f"{TOP[stem]}.weight"
    match stem.split("."):
        case ["blk", layer, part] if kind == "weight" and part in BLOCK:
            return f"model.layers.{layer}.{BLOCK[part]}.weight"
    raise ValueError(f"it has a tensor {tensor!r}, which a plain Llama does not have")


def _unpermute(name: str, weight: Array, facts: Facts) -> Array:
    """Undo llama.cpp's order of a head's dimensions: it rotates neighbours, `transformers` the two halves."""
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
    if heads is not None:
        count = facts[f"llama.attention.{heads}"]
        weight = weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    return np.ascontiguousarray(weight, dtype=np.float32)


def _save_config(facts: Facts, folder: Path, tied: bool) -> None:
    import transformers

    library: Any = transformers
    if facts["general.architecture"] != "llama" or any(name.startswith("llama.rope.scaling") for name in facts):
        raise ValueError("it is not a plain Llama")
    special = {f"{name}_id": facts.get(key) for name, key in SPECIAL.items() if name != "unk_token"}
    heads = facts["llama.attention.head_count"]
    config = library.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=facts.get("llama.attention.head_count_kv", heads),
        head_dim=facts.get("llama.rope.dimension_count", facts["llama.embedding_length"] // heads),
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings=tied,
        **special,
    )
    config.save_pretrained(folder)
    library.GenerationConfig(**special).save_pretrained(folder)


def _save_tokenizer(facts: Facts, folder: Path) -> None:
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    library: Any = transformers
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    splits = facts.get("tokenizer.ggml.pre", "gpt-2")
    if facts["tokenizer.ggml.model"] != "gpt2" or splits not in SPLITS_DIGITS:
        raise ValueError(f"its tokenizer is {facts['tokenizer.ggml.model']!r} with the splits {splits!r}")
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if SPLITS_DIGITS[splits] else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=facts["llama.context_length"],
        **{name: tokens[facts[key]] for name, key in SPECIAL.items() if key in facts},
    )
    tokenizer.chat_template = facts.get("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)
