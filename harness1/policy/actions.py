"""Calls that policies without a model make, in the form that the enabled mechanisms allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness1.env.render.view import View
from harness1.records import Tag, ToolCall
from harness1.tools.tool import ToolSpec

SPARE_TURNS = 3
"""Turns kept back for verification, the last curation and the end."""


def is_full(view: View) -> bool:
    """Whether a transcript is over the size from which on it should be pruned."""
    return view.budget.used > view.budget.limit > 0


def is_late(view: View) -> bool:
    """Whether it is time to deliver: few turns are left, or a transcript is full. Never, where neither is shown."""
    left = view.budget.turns_left()
    return is_full(view) or (left is not None and left <= SPARE_TURNS)


def curate_call(tools: Sequence[ToolSpec], add: Mapping[str, Tag], remove: Sequence[str] = ()) -> ToolCall:
    """Curate handles with their tags; where tags are off, without."""
    arguments: dict[str, Any] = {"add_ids": list(add)}
    if remove:
        arguments["remove_ids"] = list(remove)
    curate = next(spec for spec in tools if spec.name == "curate")
    if add and "importance" in curate.parameters["properties"]:
        arguments["importance"] = dict(add)
    return ToolCall("curate", arguments)
