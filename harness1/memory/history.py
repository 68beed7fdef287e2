"""The search history: one line for each action, so that the policy need not repeat itself."""

from __future__ import annotations

from typing import Any

from harness1.memory.pool import Pool
from harness1.records import Observation, Record, ToolCall

SUBJECT_CHARACTERS = 60


class HistoryLine(Record):
    """The effect of one turn. `returned` and `new` count units; `curated` counts additions."""

    turn: int
    tool: str
    subject: str
    returned: int = 0
    new: int = 0
    curated: int = 0


def history_line(turn: int, pool: Pool, call: ToolCall, observation: Observation) -> HistoryLine:
    """Sum up an action and its observation."""
    delta = observation.delta
    returned = len({pool.unit_of(hit) for hit in observation.hits}) or len(observation.verdicts)
    curated = len(delta.added) + len(delta.auto_populated)
    return HistoryLine(turn, observation.tool, subject(call), returned, len(delta.new), curated)


SUBJECTS = ("query", "queries", "pattern", "claim", "doc_id", "doc_ids", "add_ids", "remove_ids", "reasoning")
"""Arguments that say what a call is about; the first that a call has."""


def telling_argument(call: ToolCall) -> Any:
    """Return the argument that says what a call is about, or an empty text."""
    return next((value for key in SUBJECTS if (value := call.arguments.get(key))), "")


def subject(call: ToolCall) -> str:
    """Return the argument that says what a call was about, cut to one short line."""
    value = telling_argument(call)
    if isinstance(value, list):
        value = "; ".join(str(part)[:30] for part in value[:3])
    return " ".join(str(value)[: 4 * SUBJECT_CHARACTERS].split())[:SUBJECT_CHARACTERS]
