"""Chat formats by name. To add one, add a file and a line here; a plugin names its class in `harness1.formats`."""

from __future__ import annotations

from harness1.errors import ConfigError
from harness1.models.formats.chat_format import ChatFormat
from harness1.models.formats.chatml import START as CHATML
from harness1.models.formats.compact import Compact
from harness1.models.formats.harmony import CHANNEL, Harmony
from harness1.models.formats.hermes import Hermes
from harness1.models.tokenizer import Tokenizer
from harness1.plain import meant
from harness1.plugins import find_plugin, plugin_names, unfit

FORMATS: dict[str, type[ChatFormat]] = {"hermes": Hermes, "harmony": Harmony, "compact": Compact}


def open_format(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a name; `auto` chooses the one whose control tokens the tokenizer has.

    Raises:
        ConfigError: there is no such format, or `auto` finds none for this tokenizer.
        UsageError: the tokenizer lacks a control token of the format; or it is a plugin's, and two have it, or it
            cannot be imported.
    """
    if name == "auto":
        if CHANNEL in tokenizer.control:
            name = Harmony.name
        elif CHATML in tokenizer.control:
            name = Hermes.name
        else:
            raise ConfigError(f"policy.format=auto has no format for this tokenizer: choose {', '.join(_names())}")
    return (_plugin_format(name) or _built_in(name))(tokenizer)


def _built_in(name: str) -> type[ChatFormat]:
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}: choose {', '.join(_names())}{meant(name, _names())}")
    return FORMATS[name]


def _plugin_format(name: str) -> type[ChatFormat] | None:
    found: type[ChatFormat] | None = find_plugin("formats", name, FORMATS)
    if found is not None and not (isinstance(found, type) and issubclass(found, ChatFormat) and found.name == name):
        raise unfit("formats", name, "must be a subclass of ChatFormat of that name")
    return found


def _names() -> tuple[str, ...]:
    return (*FORMATS, *plugin_names("formats"))
