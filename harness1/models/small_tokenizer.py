"""Trains the tokenizer of a small model: a byte-level BPE whose tokens are phrases, names and handles.

Words are not cut at spaces: a stretch of lowercase letters is one unit before merging, as in SuperBPE (arXiv
2503.13423), so that a phrase of the world ("was the son of") is one token. Handles and the frame of a call are units.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness1.errors import optional

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HANDLE = r"[DE][0-9]+\b"
UNITS = "|".join(
    (
        rf"\b{_HANDLE}",
        r'"[a-z_]+": (?:\["|")',
        r'"\], "[a-z_]+": \["',
        r'"(?:, "|\]\}|\})',
        rf" ?(?!{_HANDLE})\p{{Lu}}[\p{{L}}\p{{M}}'’-]*",
        r" ?[0-9]+",
        rf'[^\p{{Lu}}0-9\n"]+?(?=[\p{{Lu}}0-9"]|\n|$| (?!{_HANDLE})[\p{{Lu}}0-9])\n?',
        r"\n",
        r'"',
    )
)
"""Alternatives in order: handle, frame of arguments, capitalised word, number, end of line, phrase, quotation mark."""


def save_tokenizer(folder: Path, texts: Iterable[str], size: int) -> int:
    """Train on texts and write `tokenizer.json`; return the number of tokens, including control tokens.

    Args:
        size: the size of the vocabulary without control tokens; 256 means only bytes.

    Raises:
        MissingExtra: `tokenizers` is not installed.
    """
    with optional("train"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(UNITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet, min_frequency=2),
    )
    made.add_special_tokens(list(CONTROL))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made.get_vocab_size()
