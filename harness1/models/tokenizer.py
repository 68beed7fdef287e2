"""Tokenizers: text to token ids that are never control tokens, and back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness1.errors import MissingExtra, UsageError, optional
from harness1.model_folder import base_folder, holds_adapters, refusing
from harness1.plain import utf8_safe

TOKENIZER = "tokenizer.json"
LONG = 64 << 10
"""Characters of a text whose encoding takes so long that other threads should run meanwhile."""


class Tokenizer(Protocol):
    """The vocabulary of a model, as chat formats use it."""

    @property
    def hash(self) -> str: ...

    @property
    def control(self) -> Mapping[str, int]:
        """Ids, by name, of the tokens that are not text, such as separators of messages."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, none of which is a control token, whatever the text says."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens by name. Ids that do not exist are left out; bytes that are not UTF-8
        become U+FFFD."""
        ...


class FastTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers`.

    Args:
        data: the bytes of the file.

    Raises:
        UsageError: it is not such a file, or the tokens of joined lines differ from the joined tokens of the lines.
        MissingExtra: `tokenizers` is not installed.
    """

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
        self._check_joining()

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
        size = self._size
        text: str = self._whole.decode([token for token in ids if 0 <= token < size], skip_special_tokens=False)
        return text

    @cached_property
    def _size(self) -> int:
        return max(self._whole.get_vocab(with_added_tokens=True).values()) + 1

    def _check_joining(self) -> None:
        lines = ["Turn 1: search.\n", "[D1] Ada Lovelace (1815)\nShe wrote it.\n", "Curated 0/30.\n"]
        if self.encode("".join(lines)) != [token for line in lines for token in self.encode(line)]:
            raise UsageError("the tokenizer adds something to every text: pieces of a prompt would not join exactly")


def open_tokenizer(folder: Path) -> FastTokenizer:
    """Return the tokenizer in a model's folder; adapters without one have that of their base.

    Raises:
        UsageError: the folder has no usable `tokenizer.json`.
        MissingExtra: `tokenizers` is not installed.
    """
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


def stretches(text: str, control: Mapping[str, int]) -> list[str | int]:
    """Split a text at the names of control tokens; only for texts that a program wrote, never for documents."""
    if not control:
        return [text] if text else []
    names = "|".join(re.escape(name) for name in sorted(control, key=len, reverse=True))
    parts = re.split(f"({names})", text)
    return [control.get(part, part) for part in parts if part]
