"""Settings that are no more. Files and records that hold one at its last default are read as before; any other value is
refused with the reason."""

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
    {"rl.anchors": Removed(0.0, "no training was better by advantages among turns in the same state")}
)
"""By dotted name. All of these were part of `Config.hash`, which goes on counting them at their defaults."""


def take_out_removed(tree: Mapping[str, Any]) -> None:
    """Take removed settings out of a configuration as plain data.

    Raises:
        ConfigError: one has another value than its last default.
    """
    for path, removed in REMOVED.items():
        *groups, name = path.split(".")
        group: Any = tree
        for each in groups:
            group = group.get(each) if isinstance(group, dict) else None
        if isinstance(group, dict) and name in group and group.pop(name) != removed.default:
            raise ConfigError(f"configuration: {path} was removed, as {removed.reason}")


def put_back_removed(tree: dict[str, Any]) -> None:
    """Put removed settings back into a whole configuration as plain data, at their last defaults."""
    for path, removed in REMOVED.items():
        *groups, name = path.split(".")
        group = tree
        for each in groups:
            group = group[each]
        group[name] = removed.default
