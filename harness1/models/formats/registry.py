"""Chat formats by name. To add one, add a file and a line here."""

from __future__ import annotations

from harness1.errors import ConfigError
from harness1.models.formats.chat_format import ChatFormat
from harness1.models.formats.chatml import START as CHATML
from harness1.models.formats.compact import Compact
from harness1.models.formats.harmony import CHANNEL, Harmony
from harness1.models.formats.hermes import Hermes
from harness1.models.tokenizer import Tokenizer

FORMATS: dict[str, type[ChatFormat]] = {"hermes": Hermes, "harmony": Harmony, "compact": Compact}


def open_format(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a name; `auto` chooses the one whose control tokens the tokenizer has.

    Raises:
        ConfigError: there is no such format, or `auto` finds none for this tokenizer.
        UsageError: the tokenizer lacks a control token of the format.
    """
    if name == "auto":
        if CHANNEL in tokenizer.control:
            name = Harmony.name
        elif CHATML in tokenizer.control:
            name = Hermes.name
        else:
            raise ConfigError(f"policy.format=auto has no format for this tokenizer: choose {', '.join(FORMATS)}")
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}: choose {', '.join(FORMATS)}")
    return FORMATS[name](tokenizer)
