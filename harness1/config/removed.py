"""Settings that are no more. Records that hold one are read as before, and so are files that hold it at its last
default; files and overrides with another value are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from harness1.errors import ConfigError


class Removed(NamedTuple):
    """The last default of a setting, and why it went."""

    default: Any
    reason: str


REMOVED: Mapping[str, Removed] = MappingProxyType(
    {"rl.anchors": Removed(0.0, "no training here was shown to be better by advantages among turns in the same state")}
)
"""By dotted name. All of these were part of `Config.hash`, which goes on counting them at their defaults."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {("env.verification.judge", "fitted"): "it found contradictions hardly better than chance (notebook/removed.md)"}
)
"""Values of settings that stayed, and why these went."""


def take_out_removed(tree: Mapping[str, Any]) -> None:
    """Take removed settings out of a configuration as plain data, whatever their values."""
    for path in REMOVED:
        for group in _group(tree, path):
            group.pop(path.rpartition(".")[2], None)


def refuse_removed(tree: Mapping[str, Any]) -> None:
    """Refuse a removed setting with another value than its last default, or a removed value of another.

    Raises:
        ConfigError: it says why it was removed.
    """
    for path, removed in REMOVED.items():
        for group in _group(tree, path):
            if group.get(path.rpartition(".")[2], removed.default) != removed.default:
                raise ConfigError(f"configuration: {path} was removed: {removed.reason}")
    for (path, value), reason in REMOVED_VALUES.items():
        for group in _group(tree, path):
            if group.get(path.rpartition(".")[2]) == value:
                raise ConfigError(f"configuration: {path}={value} was removed: {reason}")


def put_back_removed(tree: Mapping[str, Any]) -> None:
    """Put removed settings back at their last defaults into the groups that a configuration as plain data has."""
    for path, removed in REMOVED.items():
        for group in _group(tree, path):
            group[path.rpartition(".")[2]] = removed.default


def _group(tree: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    """Yield the group of settings that a dotted name is in, if there is one."""
    group: Any = tree
    for name in path.split(".")[:-1]:
        group = group.get(name) if isinstance(group, Mapping) else None
    if isinstance(group, dict):
        yield group
