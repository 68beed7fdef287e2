"""A real tokenizer without a network: byte-level BPE at the speed of tiktoken, trained at start or read from a file."""

from __future__ import annotations

import base64
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from harness1.env.pieces import Piece
from harness1.plain import digest
from harness1.tools.tool import ToolSpec

TRAINED_SIZE = 16384

TRAINING_BYTES = 4_000_000

MESSAGE_TOKENS = 4
"""Number of tokens that a chat format puts around a message: start, role, separator, end."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pattern by which o200k_base cuts text into words before it merges bytes."""


class EncodingCounter:
    """A `TokenCounter` over a tokenizer; special tokens in a text count as the ordinary text that they are."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.hash = digest([encoding.name, encoding.token_byte_values(), MESSAGE_TOKENS])

    def piece(self, piece: Piece) -> int:
        return len(self.encoding.encode_ordinary(piece.text))

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        return len(self.encoding.encode_ordinary(msgspec.json.encode(specs).decode()))

    def overhead(self, first: Piece) -> int:
        return MESSAGE_TOKENS


class EncodingTokenizer:
    """A `Tokenizer` for chat formats over a tokenizer without control tokens: these are numbered behind its own."""

    def __init__(self, encoding: tiktoken.Encoding, control: Sequence[str]) -> None:
        self.encoding = encoding
        self.control = {name: encoding.n_vocab + place for place, name in enumerate(control)}
        self.hash = digest([encoding.name, self.control])

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode([token for token in ids if token < self.encoding.n_vocab])


def tokenizer(vocab: Path | None) -> tiktoken.Encoding:
    """Return the o200k_base vocabulary of a `.tiktoken` file, or else one trained on this Python's standard library.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a `.tiktoken` file.
    """
    return _read(vocab) if vocab is not None else _trained()


def _read(vocab: Path) -> tiktoken.Encoding:
    lines = (line.split() for line in vocab.read_bytes().splitlines() if line)
    return _encoding(vocab.stem, {base64.b64decode(token): int(rank) for token, rank in lines})


@lru_cache(maxsize=1)
def _trained() -> tiktoken.Encoding:
    """Train on the sources of the standard library, which are code and English prose."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_SIZE, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bare.train_from_iterator(_sources(), trainer)
    # Ids rise in the order of the merges, so they are the ranks; tokens are written in a printable alphabet.
    names: dict[str, int] = json.loads(bare.to_str())["model"]["vocab"]
    letters = _printable_bytes()
    ranks = {bytes(letters[letter] for letter in name): rank for name, rank in names.items()}
    return _encoding(f"stdlib-{sys.version_info.major}.{sys.version_info.minor}", ranks)


def _encoding(name: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def _sources() -> Iterator[str]:
    left = TRAINING_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        if left < 0:
            return
        yield text


def _printable_bytes() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: visible Latin-1 characters are themselves, others follow from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
