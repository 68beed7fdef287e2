"""Calls made by policies without a model, in the form that the enabled mechanisms allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness1.env.render.view import View
from harness1.records import Tag, ToolCall
from harness1.tools.tool import ToolSpec

FAN_OUT = "fan_out_search"
"""The tool that searches for several queries at once."""
SPARE_TURNS = 3
"""Turns reserved for verification, the last curation and the end."""


def is_full(view: View) -> bool:
    """Return whether a transcript is above the size from which it should be pruned."""
    return view.budget.used > view.budget.limit > 0


def is_late(view: View) -> bool:
    """Return whether it is time to deliver: few turns are left, or a transcript is full. Never if neither is shown."""
    left = view.budget.turns_left()
    return is_full(view) or (left is not None and left <= SPARE_TURNS)


def search_call(*queries: str) -> ToolCall:
    """Return a call that searches for one query, or for several at once."""
    if len(queries) == 1:
        return ToolCall("search_corpus", {"query": queries[0]})
    return ToolCall(FAN_OUT, {"queries": list(queries)})


def curate_call(tools: Sequence[ToolSpec], add: Mapping[str, Tag], remove: Sequence[str] = ()) -> ToolCall:
    """Return a call that curates handles, with their tags if tags are on."""
    arguments: dict[str, Any] = {"add_ids": list(add)}
    if remove:
        arguments["remove_ids"] = list(remove)
    curate = next(spec for spec in tools if spec.name == "curate")
    if add and "importance" in curate.parameters["properties"]:
        arguments["importance"] = dict(add)
    return ToolCall("curate", arguments)
