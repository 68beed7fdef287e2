"""Small random language models in folders, for tests of what runs them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 300
STOP = 256
"""The id behind the 256 bytes; the rest of the vocabulary is not used by the tokenizer."""

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # so that the distributions are far from uniform
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": STOP,
}

GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""What makes a model of type `gpt_oss` as small as the others; its experts are 3-D parameters."""


def save_tiny_model(folder: Path, kind: str = "llama", seed: int = 0, **settings: Any) -> Path:
    """A random model of one of transformers' types, in float32; its seed decides its weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SHAPE, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> Path:
    """A tokenizer whose ids 0 to 255 are bytes in the order of their byte-level letters, and 256 the stop token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<stop>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<stop>").save_pretrained(folder)
    return folder
