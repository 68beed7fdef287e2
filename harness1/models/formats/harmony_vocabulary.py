"""The vocabulary of gpt-oss from `openai-harmony`, for a model behind a server whose tokenizer is not at hand."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.errors import UsageError, optional
from harness1.hashing import digest
from harness1.plain import utf8_safe


class HarmonyVocabulary:
    """A `Tokenizer` over the encoding of `openai-harmony`, which downloads its vocabulary or reads it from the folder
    in its own variable `TIKTOKEN_ENCODINGS_BASE`.

    Raises:
        MissingExtra: `openai-harmony` is not installed.
        UsageError: the package finds no vocabulary.
    """

    def __init__(self) -> None:
        with optional("harmony"):
            from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
        try:
            self._encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except HarmonyError as error:
            raise UsageError(
                f"openai-harmony has no vocabulary ({error}): set TIKTOKEN_ENCODINGS_BASE to a folder with"
                " o200k_base.tiktoken"
            ) from error
        names = self._encoding.special_tokens_set
        self.control = {name: self._encoding.encode(name, allowed_special="all")[0] for name in sorted(names)}
        self.hash = digest([self._encoding.name, self.control])
        self._size = max(self.control.values()) + 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode(utf8_safe(text), disallowed_special=())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self._size]
        text: str = self._encoding.decode(known, errors="replace")
        return text
