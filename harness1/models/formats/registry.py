"""Chat formats by name. Adding one is one file and one line here."""

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
    """The format of a name; `auto` takes the one that the tokenizer has the control tokens of.

    Raises:
        ConfigError: there is no such format, or none for this tokenizer.
        UsageError: the tokenizer lacks a control token of the format.
    """
    if name == "auto":
        if CHANNEL in tokenizer.control:
            name = Harmony.name
        elif CHATML in tokenizer.control:
            name = Hermes.name
        else:
            raise ConfigError(f"policy.format=auto knows no format for this tokenizer: choose {', '.join(FORMATS)}")
    if name not in FORMATS:
        raise ConfigError(f"there is no format {name!r}: choose {', '.join(FORMATS)}")
    return FORMATS[name](tokenizer)
