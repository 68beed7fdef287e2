"""The base class of settings groups, ranges of numbers, differences, and what each setting says of itself."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import zip_longest
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


SWITCHES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {name: (name, "on") for name in ("fan_out", "grep", "read", "review", "verification", "auto_populate", "dedup")}
    | {name: (name, "on") for name in ("compression", "evidence", "leads", "history", "budget_marker", "pruning")}
    | {"tags": ("curation", "tags"), "rank": ("evidence", "rank"), "entity_handles": ("evidence", "handles")}
    | {"lead_handles": ("leads", "handles"), "marks": ("rendering", "marks")}
)
"""The switch of each mechanism of an environment, as group and name: `env.grep.on`. Files, overrides, hashes and older
records have these in place of `env.mechanisms`."""


UNITED: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "rl": {"ratio": {"ratio_min": 0.0, "ratio_max": 5.0}},
        "index.dense": {"prefixes": {"query_prefix": "", "document_prefix": ""}},
        "env.evidence": {"shared": {"entities": 8, "documents": 5}},
        "env.pruning": {"limits": {"tokens": 16384, "refusal": 24326}},
        "env.rendering": {"window": {"recent": 5, "recent_max": 9}},
    }
)
"""By group, the settings of which each holds several earlier ones: their names with their defaults. Hashes and older
records have the earlier ones, and files and overrides may."""


def _walk_united(tree: dict[str, Any], prefix: str) -> Iterator[tuple[dict[str, Any], str, Mapping[str, Any]]]:
    """Yield each group of a configuration that has a united setting, with the names of this and of the earlier ones."""
    for place, settings in UNITED.items():
        group: Any = tree if f"{place}.".startswith(prefix) else None
        for name in f"{place}.".removeprefix(prefix).split(".")[:-1]:
            group = group.get(name) if isinstance(group, dict) else None
        if isinstance(group, dict):
            yield from ((group, name, earlier) for name, earlier in settings.items())


def unite(tree: dict[str, Any], prefix: str = "") -> None:
    """Replace earlier settings of a configuration by those that hold them now (`UNITED`)."""
    for group, name, earlier in _walk_united(tree, prefix):
        now = group.get(name, list(earlier.values()))
        if earlier.keys() & group.keys() and isinstance(now, list) and len(now) == len(earlier):
            group[name] = [group.pop(old, value) for old, value in zip(earlier, now, strict=True)]


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name of each setting that differs between configurations as plain data, and its value in each,
    None if it is absent; of mechanisms, their switches. `prefix`: what names begin with, such as `env.`."""
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name), theirs.get(name)
        if name == "mechanisms" and isinstance(mine, Collection) and isinstance(other, Collection):
            switched = (each for each in SWITCHES if (each in mine) != (each in other))
            yield from ((prefix + ".".join(SWITCHES[each]), each in mine, each in other) for each in switched)
        elif {type(mine), type(other)} - {type(None)} == {dict}:
            yield from differences(mine or {}, other or {}, f"{prefix}{name}.")
        elif mine != other:
            yield f"{prefix}{name}", mine, other


def notes(kind: type[Settings], prefix: str = "") -> dict[str, str]:
    """Return what the source says of groups and settings, by dotted name: comments beside fields, or texts below."""
    said: dict[str, str] = {}
    lines, classes = _read_source(kind.__module__)
    body = classes.get(kind.__name__, [])
    for field, below in zip_longest(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = lines[(field.end_lineno or 0) - 1].partition("  # ")[2]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = str(below.value.value)
            said |= {field.target.id: " ".join(text.split())} if text else {}
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


@cache
def _read_source(module: str) -> tuple[list[str], dict[str, list[ast.stmt]]]:
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return [], {}
    return source.splitlines(), {one.name: one.body for one in ast.parse(source).body if isinstance(one, ast.ClassDef)}


class Removed(NamedTuple):
    """The last default of a setting, by recipe if a mapping, None if any value is read; and why it went."""

    default: Any
    reason: str

    def default_in(self, group: Mapping[str, Any]) -> Any:
        """Return the last default beside the other settings of its group."""
        return self.default.get(str(group.get("recipe", "paper"))) if isinstance(self.default, dict) else self.default


_TABLE = msgspec.toml.decode(Path(__file__).with_name("removed.toml").read_bytes(), type=dict[str, Any])
REMOVED: Mapping[str, Removed] = MappingProxyType(
    {
        path: Removed(default, group["reason"])
        for group in _TABLE["settings"]
        for path, default in group["defaults"].items()
    }
    | {path: Removed(None, "it decides no result") for path in _TABLE["ignored"]}
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
LATER: Mapping[str, Any] = MappingProxyType(_TABLE["later"])
"""By dotted name, the settings that are younger than hashes, with the values that mean off: others count."""


def without_removed(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration, or one group of it, without removed settings and those with a removed value."""
    kept = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path in _PARENTS:
            if (group := without_removed(value, f"{path}.")) or "." not in path:  # else all of the group was removed
                kept[name] = group
        elif path not in REMOVED and not (isinstance(value, str) and (path, value) in REMOVED_VALUES):
            kept[name] = value
    return kept


def present(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return recorded settings as this version has them; raise ConfigError as `refuse_removed` does."""
    refuse_removed(tree, prefix)
    return without_removed(tree, prefix)


def lost(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and reason of each removed setting not at its last default, and of each removed value."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in REMOVED and REMOVED[path].default_in(tree) not in (None, value):  # None also in no known recipe
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
    """Return a group of settings as records and hashes have it: with removed ones, at their last defaults."""
    return put_back_removed(msgspec.to_builtins(settings), prefix)


def to_hash(settings: Settings, prefix: str) -> dict[str, Any]:
    """Return a group of settings as hashes have it: as records have it, without later ones that are off."""
    return without_later(to_record(settings, prefix), prefix)


def without_later(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Take the later settings that are off out of a group as plain data, and return it."""
    for path, off in LATER.items():
        *groups, name = path.removeprefix(prefix).split(".")
        group: Any = tree if path.startswith(prefix) else {}
        for each in groups:
            group = group.get(each, {})
        if name in group and group[name] == off:
            del group[name]
    return tree


def put_back_removed(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Put the removed settings of a group, or those of the sections that a configuration has, back at their last
    defaults, and earlier ones in place of those that hold them now; return it."""
    for group, name, earlier in _walk_united(tree, prefix):
        group |= zip(earlier, group.pop(name), strict=True)
    for path, removed in REMOVED.items():
        if path.startswith(prefix) and not path.startswith("machine."):  # which no hash counts
            *groups, name = path.removeprefix(prefix).split(".")
            if prefix or isinstance(tree.get(groups[0]), dict):
                group = tree
                for each in groups:
                    group = group.setdefault(each, {})
                group[name] = removed.default_in(group)
    return tree
