"""The base class of settings groups, the ranges of their numbers, how two configurations differ, and what each setting
says of itself."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, dataclass_transform

import msgspec
from msgspec import Meta

from harness1.errors import ConfigError

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Weight = Annotated[float, Meta(ge=0.0)]
Seconds = Annotated[float, Meta(gt=0.0)]
Rate = Annotated[float, Meta(gt=0.0)]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base class of all settings groups: immutable, unknown keys refused."""


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name of each setting that differs between configurations as plain data, and its value in each,
    None if it is absent. `prefix`: what names begin with, such as `env.`, as in all of these functions."""
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name), theirs.get(name)
        if {type(mine), type(other)} - {type(None)} == {dict}:
            yield from differences(mine or {}, other or {}, f"{prefix}{name}.")
        elif mine != other:
            yield f"{prefix}{name}", mine, other


def leave_out_default(tree: dict[str, Any], defaults: Mapping[str, Any], path: str) -> None:
    """Remove the setting with a dotted name from a configuration as plain data, if it has its default there."""
    *groups, name = path.split(".")
    for group in groups:
        tree, defaults = tree[group], defaults[group]
    if tree[name] == defaults[name]:
        del tree[name]


def notes(kind: type[Settings], prefix: str = "") -> dict[str, str]:
    """Return what the source says of each group and setting of a class, by dotted name."""
    said = _read_notes(kind)
    found: dict[str, str] = {}
    for each in msgspec.structs.fields(kind):
        name = f"{prefix}{each.name}"
        if isinstance(each.type, type) and issubclass(each.type, Settings):
            if own := each.type.__dict__.get("__doc__"):
                found[name] = " ".join(own.split())
            found |= notes(each.type, f"{name}.")
        elif each.name in said:
            found[name] = said[each.name]
    return found


def _read_notes(kind: type[Settings]) -> dict[str, str]:
    """Return the strings that stand below the fields of a class, on one line each."""
    body = _classes(kind.__module__).get(kind.__name__, [])
    found = {}
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the bodies of a module's classes by name; none where its source is not at hand."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)}


class Removed(NamedTuple):
    """The last default of a setting, and why it went."""

    default: Any
    reason: str


_TABLE = msgspec.toml.decode(Path(__file__).with_name("removed.toml").read_bytes(), type=dict[str, Any])
REMOVED: Mapping[str, Removed] = MappingProxyType(
    {
        path: Removed(default, group["reason"])
        for group in _TABLE["settings"]
        for path, default in group["defaults"].items()
    }
)
"""By dotted name. Hashes and cards go on counting them at these values: they never change."""
_PARENTS = {path.rsplit(".", depth)[0] for path in REMOVED for depth in range(1, path.count(".") + 1)}
RUN: Mapping[str, Any] = MappingProxyType(_TABLE["run"])
"""What hashes have in place of `[machine]`, once called `[run]`."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("env.verification.judge", "fitted"): "it found contradictions hardly better than chance (notebook/removed.md)",
        ("index.dense.search", "ivf"): "nothing was shown to be better by it than by hnsw",
    }
)
"""Values of settings that stayed, and why these went."""


def without_removed(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration as plain data, or one group of it, without the removed settings, whatever their values."""
    kept = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path in _PARENTS:
            if (group := without_removed(value, f"{path}.")) or "." not in path:  # else all of the group was removed
                kept[name] = group
        elif path not in REMOVED:
            kept[name] = value
    return kept


def present(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return recorded settings as this version has them; raise ConfigError as `refuse_removed` does."""
    refuse_removed(tree, prefix)
    return without_removed(tree, prefix)


def lost(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the dotted name, the value and the reason of each removed setting with another value than its last default,
    and of each removed value of another."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in REMOVED and value != REMOVED[path].default:
            yield path, value, f"{path} was removed: {REMOVED[path].reason}"
        if isinstance(value, str) and (path, value) in REMOVED_VALUES:
            yield path, value, f"{path}={value} was removed: {REMOVED_VALUES[path, value]}"
        if isinstance(value, dict) and path in _PARENTS:
            yield from lost(value, f"{path}.")


def refuse_removed(tree: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what is `lost`; raise ConfigError, which says why it was removed."""
    for _, _, reason in lost(tree, prefix):
        raise ConfigError(f"configuration: {reason}")


def to_record(settings: Settings, prefix: str) -> dict[str, Any]:
    """Return a group of settings as plain data as records and hashes have it: with those that were removed, at their
    last defaults."""
    tree: dict[str, Any] = msgspec.to_builtins(settings)
    put_back_removed(tree, prefix)
    return tree


def last_defaults(prefix: str) -> dict[str, Any]:
    """Return the removed settings of a group at their last defaults, as records and hashes have it."""
    tree: dict[str, Any] = {}
    put_back_removed(tree, prefix)
    return tree


def put_back_removed(tree: dict[str, Any], prefix: str = "") -> None:
    """Put the removed settings of a group, or those of the sections that a configuration has, back at their last
    defaults."""
    for path, removed in REMOVED.items():
        if path.startswith(prefix) and not path.startswith("machine."):  # which no hash counts
            *groups, name = path.removeprefix(prefix).split(".")
            if prefix or isinstance(tree.get(groups[0]), dict):
                group = tree
                for each in groups:
                    group = group.setdefault(each, {})
                group[name] = removed.default
