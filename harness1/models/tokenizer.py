"""Tokenizers: text to token ids that are never control tokens, and back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness1.errors import MissingExtra, UsageError
from harness1.plain import utf8_safe

TOKENIZER = "tokenizer.json"


class Tokenizer(Protocol):
    """What a chat format needs of a model's vocabulary."""

    @property
    def hash(self) -> str: ...

    @property
    def control(self) -> Mapping[str, int]:
        """Ids of the tokens that stand for no text: what separates messages, and the like."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text as text: whatever it says, none of them is a control token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens by their names. Ids that do not exist are left out; bytes that are no UTF-8
        become U+FFFD."""
        ...


class FastTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers`.

    Args:
        data: the bytes of the file.

    Raises:
        UsageError: it is no such file, or its tokens of joined lines differ from the joined tokens of the lines.
        MissingExtra: `tokenizers` is not installed.
    """

    def __init__(self, data: bytes) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ModuleNotFoundError as error:
            raise MissingExtra("tokenizers", "train") from error
        self.hash = hashlib.sha256(data).hexdigest()
        try:
            tree: dict[str, Any] = msgspec.json.decode(data)
            self._whole = Loaded.from_buffer(data)
            # Without its added tokens, it takes their names in a text for the text that they are.
            plain = {**tree, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            self._plain = Loaded.from_buffer(msgspec.json.encode(plain))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a tokenizer.json: {error}") from error
        # Where the ids in a file leave holes, the library numbers them anew: its ids are the ones in use.
        added = self._whole.get_added_tokens_decoder().items()
        self.control: dict[str, int] = {token.content: number for number, token in sorted(added)}
        self._ids = frozenset(self.control.values())
        self._check_joining()

    def encode(self, text: str) -> list[int]:
        text = utf8_safe(text)
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._ids.isdisjoint(ids):
            return ids
        # A vocabulary may hold the name of a control token as a word: in pieces it is none.
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
            raise UsageError("this tokenizer adds something to every text: pieces of a prompt would not join exactly")


def open_tokenizer(folder: Path) -> FastTokenizer:
    """The tokenizer of a model's folder.

    Raises:
        UsageError: the folder holds no `tokenizer.json` that can be used.
        MissingExtra: `tokenizers` is not installed.
    """
    path = folder / TOKENIZER
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{folder} holds no {TOKENIZER}: {error.strerror}") from error
    try:
        return FastTokenizer(data)
    except MissingExtra:
        raise
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def stretches(text: str, control: Mapping[str, int]) -> list[str | int]:
    """A text cut at the names of control tokens: for texts that a program wrote, never for those of documents."""
    if not control:
        return [text] if text else []
    names = "|".join(re.escape(name) for name in sorted(control, key=len, reverse=True))
    parts = re.split(f"({names})", text)
    return [control.get(part, part) for part in parts if part]
