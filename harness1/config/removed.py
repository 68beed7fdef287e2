"""Settings that are no more. Records that hold one are read as before, and so are files that hold it at its last
default; files and overrides with another value are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from harness1.errors import ConfigError


class Removed(NamedTuple):
    """The last default of a setting, and why it went."""

    default: Any
    reason: str


REMOVED: Mapping[str, Removed] = MappingProxyType(
    {
        "rl.anchors": Removed(0.0, "no training was shown to be better by advantages among turns in the same state"),
        "rl.kl": Removed(0.0, "a penalty on the divergence from the start made no training here better"),
    }
)
"""By section and name. All of these were part of `Config.hash`, which goes on counting them at their defaults."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {("env.verification.judge", "fitted"): "it found contradictions hardly better than chance (notebook/removed.md)"}
)
"""Values of settings that stayed, and why these went."""


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as plain data without the removed settings, whatever their values."""
    kept = dict(tree)
    for path in REMOVED:
        section, name = path.split(".")
        if isinstance(kept.get(section), dict):
            kept[section] = {each: value for each, value in kept[section].items() if each != name}
    return kept


def refuse_removed(tree: Mapping[str, Any]) -> None:
    """Refuse a removed setting with another value than its last default, or a removed value of another.

    Raises:
        ConfigError: it says why it was removed.
    """
    for path, removed in REMOVED.items():
        if _value(tree, path, removed.default) != removed.default:
            raise ConfigError(f"configuration: {path} was removed: {removed.reason}")
    for (path, value), reason in REMOVED_VALUES.items():
        if _value(tree, path, None) == value:
            raise ConfigError(f"configuration: {path}={value} was removed: {reason}")


def put_back_removed(tree: Mapping[str, Any]) -> None:
    """Put removed settings back at their last defaults into the sections that a configuration as plain data has."""
    for path, removed in REMOVED.items():
        section, name = path.split(".")
        if section in tree:
            tree[section][name] = removed.default


def _value(tree: Any, path: str, default: Any) -> Any:
    """Return the value of a setting by its dotted name, or the default where it is not set."""
    for name in path.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return default
        tree = tree[name]
    return tree
