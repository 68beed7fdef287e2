"""The base class of settings groups, the ranges of their numbers, and how two configurations differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
