"""Calls that policies without a model make, in the form that the enabled mechanisms allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness1.env.view import View
from harness1.records import Tag, ToolCall
from harness1.tools.tool import ToolSpec

SPARE_TURNS = 3
"""Turns kept back for verification, the last curation and the end."""


def is_late(view: View) -> bool:
    """Whether it is time to deliver; never, where the turns that are left are not shown."""
    left = view.budget.turns_left()
    return left is not None and left <= SPARE_TURNS


def curate_call(tools: Sequence[ToolSpec], add: Mapping[str, Tag], remove: Sequence[str] = ()) -> ToolCall:
    """Curate handles with their tags; where tags are off, without."""
    arguments: dict[str, Any] = {"add_ids": list(add)}
    if remove:
        arguments["remove_ids"] = list(remove)
    curate = next(spec for spec in tools if spec.name == "curate")
    if add and "importance" in curate.parameters["properties"]:
        arguments["importance"] = dict(add)
    return ToolCall("curate", arguments)
