"""Tokenizers: text to token ids that are never control tokens, and back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness1.errors import MissingExtra, UsageError, optional
from harness1.model_folder import base_folder, holds_adapters, refusing
from harness1.plain import digest, utf8_safe

TOKENIZER = "tokenizer.json"
LONG = 64 << 10  # characters of a text whose encoding takes so long that other threads should run meanwhile


class Tokenizer(Protocol):
    """The vocabulary of a model, as chat formats use it."""

    @property
    def hash(self) -> str: ...

    @property
    def control(self) -> Mapping[str, int]:
        """Ids, by name, of the tokens that are not text, such as separators of messages."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, none of which is a control token, whatever the text says."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens by name. Unknown ids are left out; invalid UTF-8 is U+FFFD."""


class FastTokenizer:
    """A `tokenizer.json` from its bytes. Raises UsageError if it is none, or tokens of joined lines are not joined."""

    def __init__(self, data: bytes) -> None:
        with optional("train"):
            from tokenizers import Tokenizer as Loaded
        self.hash = hashlib.sha256(data).hexdigest()
        with refusing("not a tokenizer.json"):
            tree: dict[str, Any] = msgspec.json.decode(data)
            self._whole = Loaded.from_buffer(data)
            # Without its added tokens, it encodes their names in a text as plain text.
            plain = {**tree, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            self._plain = Loaded.from_buffer(msgspec.json.encode(plain))
        # The library renumbers ids if those in the file have gaps: only its own ids are valid.
        added = self._whole.get_added_tokens_decoder().items()
        self.control: dict[str, int] = {token.content: number for number, token in sorted(added)}
        self._ids = frozenset(self.control.values())
        lines = ["Turn 1: search.\n", "[D1] Ada Lovelace (1815)\nShe wrote it.\n", "Curated 0/30.\n"]
        if self.encode("".join(lines)) != [token for line in lines for token in self.encode(line)]:
            raise UsageError("the tokenizer adds something to every text: pieces of a prompt would not join exactly")

    def encode(self, text: str) -> list[int]:
        text = utf8_safe(text)
        # Only the encoding of a batch lets other threads run meanwhile.
        whole = self._plain.encode_batch([text], False, False)[0] if len(text) > LONG else None
        ids: list[int] = (whole or self._plain.encode(text, add_special_tokens=False)).ids
        if self._ids.isdisjoint(ids):
            return ids
        # A control token's name may also be a word of the vocabulary. Encoding by character avoids that id.
        return [token for character in text for token in self._plain.encode(character, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        # The library leaves out the ids that it does not know, but takes no others than of 32 bits.
        text: str = self._whole.decode([token for token in ids if 0 <= token < 1 << 32], skip_special_tokens=False)
        return text


def open_tokenizer(folder: Path) -> FastTokenizer:
    """Return the tokenizer of a model's folder, or of the base of adapters; UsageError if none is usable."""
    path = folder / TOKENIZER
    if not path.is_file() and holds_adapters(folder):
        path = base_folder(folder) / TOKENIZER
    try:
        return FastTokenizer(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{folder} has no {TOKENIZER}: {error.strerror}") from error
    except MissingExtra:
        raise
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def split_at_control(text: str, control: Mapping[str, int]) -> list[str | int]:
    """Split a text at the names of control tokens; only for texts that a program wrote, never for documents."""
    names = "|".join(re.escape(name) for name in sorted(control, key=len, reverse=True))
    parts = re.split(f"({names})", text) if names else [text]
    return [control.get(part, part) for part in parts if part]


class HarmonyVocabulary:
    """The vocabulary of gpt-oss, for a model behind a server: a `Tokenizer` over `openai-harmony`, which downloads it,
    or reads it from the folder in its own variable `TIKTOKEN_ENCODINGS_BASE`, or else UsageError is raised."""

    def __init__(self) -> None:
        with optional("harmony"):
            from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
        try:
            self._encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except HarmonyError as error:
            hint = "set TIKTOKEN_ENCODINGS_BASE to a folder with o200k_base.tiktoken"
            raise UsageError(f"openai-harmony has no vocabulary ({error}): {hint}") from error
        names = self._encoding.special_tokens_set
        self.control = {name: self._encoding.encode(name, allowed_special="all")[0] for name in sorted(names)}
        self.hash = digest([self._encoding.name, self.control])
        self._size = max(self.control.values()) + 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode(utf8_safe(text), disallowed_special=())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._encoding.decode([token for token in ids if 0 <= token < self._size], errors="replace")
        return text


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
    """Train a byte-level BPE of a size (256: only bytes) and control tokens on texts, and write `tokenizer.json`;
    return the number of tokens. They are phrases, names and handles: words are not cut at spaces, as a stretch of
    lowercase letters is one unit before merging (SuperBPE, arXiv 2503.13423); so are handles and a call's frame."""
    with optional("train"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    made = Tokenizer(models.BPE())
    units = pre_tokenizers.Split(Regex(UNITS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([units, to_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: dict[str, Any] = {"vocab_size": size, "show_progress": False, "min_frequency": 2}
    made.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    made.add_special_tokens(list(CONTROL))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / TOKENIZER))
    return made.get_vocab_size()
