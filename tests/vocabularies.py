"""Small byte-level tokenizers, trained on the spot: what the real ones differ in, without a download.

`chatml` cuts words as GPT-2 and SmolLM2 do, `qwen` as Qwen 2.5 and Llama 3 (the tags of its calls are added tokens that
are not special, and it composes characters), `harmony` as o200k_base.
"""

import json
from functools import lru_cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from benchmarks.workload import PATTERN
from harness1.config import Env
from harness1.env.pieces import static_piece
from harness1.models.chat_format import ChatFormat
from harness1.models.formats import open_format
from harness1.models.tokenizer import FastTokenizer
from harness1.tools.registry import Toolbox

QWEN_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
HARMONY_WORDS = ("startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call")
HARMONY = tuple(f"<|{word}|>" for word in HARMONY_WORDS)
KINDS = {"chatml": (None, CHATML, ()), "qwen": (QWEN_WORDS, CHATML, TAGS), "harmony": (PATTERN, HARMONY, ())}
"""Each tokenizer: how it cuts words (None: as GPT-2), its control tokens, and added tokens that are not special."""
SPOKEN = (("compact", "chatml"), ("compact", "qwen"), ("hermes", "chatml"), ("hermes", "qwen"), ("harmony", "harmony"))
"""Formats, each with the kinds of tokenizers that it is tested with."""
SIZE = 1500


@lru_cache(maxsize=len(KINDS))
def vocabulary(kind: str) -> bytes:
    words, control, tags = KINDS[kind]
    made = Tokenizer(models.BPE())
    if words is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        made.normalizer = normalizers.NFC() if tags else None
        cut = pre_tokenizers.Split(Regex(words), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(_texts(), trainer)
    tree: dict[str, Any] = json.loads(made.to_str())
    size = len(tree["model"]["vocab"])
    tree["added_tokens"] = [
        _added(size + place, name, special=name in control) for place, name in enumerate((*control, *tags))
    ]
    return json.dumps(tree).encode()


@lru_cache(maxsize=len(KINDS))
def tokenizer(kind: str) -> FastTokenizer:
    return FastTokenizer(vocabulary(kind))


def chat_format(name: str, kind: str) -> ChatFormat:
    return open_format(name, tokenizer(kind))


def _added(token: int, content: str, *, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": special, **plain}


def _texts() -> list[str]:
    """English, calls, tags, runs of line ends and of punctuation: whatever a merge could go wrong with."""
    env = Env()
    toolbox = Toolbox.of(env)
    specs = [f"{spec.name} {spec.description} {json.dumps(spec.parameters)}" for spec in toolbox.specs]
    frames = [
        "Turn 1: search_corpus: river.\n[D1] Ada Lovelace\nShe wrote.\n\nCurated 3/30.\n\n\nBudget: 10 of 20 tokens.\n",
        '<tool_call>\n{"name": "search_corpus", "arguments": {"query": "x"}}\n</tool_call>',
        "<tool_response>\n</tool_response>\n<think>\n</think> // /* */ ./.\n/a\n//\n.\n/ ?!\n/\r\n\r\n \n\t\n  \n",
        "<|im_start|>user\n<|im_end|>\n<|start|>assistant<|channel|>analysis<|message|><|end|><|call|><|return|>",
    ]
    return [static_piece(env, toolbox).text, *specs, *frames * 20]
