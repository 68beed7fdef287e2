"""The base class of settings groups, the ranges of their numbers, how two configurations differ, and what each setting
says of itself."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, dataclass_transform

import msgspec
from msgspec import Meta

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
    """Yield the dotted name of each setting that differs, and its value in each configuration, None if it is absent.

    Args:
        ours, theirs: configurations as plain data, groups within groups.
        prefix: what names begin with, such as `env.`.
    """
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
    """Return what the source says of each group and setting, by dotted name; settings without a word are left out.

    Args:
        kind: the class of the whole configuration, or of one group.
        prefix: what names begin with, such as `env.`.
    """
    said = _said(kind)
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


def _said(kind: type[Settings]) -> dict[str, str]:
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
