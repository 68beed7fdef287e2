"""Why episodes fell short: the reason of each in one word, to filter lists by, and the account of broken ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

from harness1.records import StopReason
from harness1.reward.measures import Outcome

Faults = Literal["exclude", "zero"]
"""How an episode that the infrastructure broke counts in means: not at all, or as one that found nothing."""
BROKEN = {
    StopReason.CONTEXT_OVERFLOW: "context limit",
    StopReason.FORMAT_LIMIT: "no readable action",
    StopReason.FAULT: "infrastructure",
}
"""The ends of an episode that is broken. The first two are the policy's failure, and count as 0."""
SHOWN_REASONS = 3


class FailureClass(StrEnum):
    """Reasons in order of precedence; the first that applies counts."""

    FAULT = "fault"
    FORMAT = "format"
    CONTEXT = "context"
    UNSCORED = "unscored"
    COMPLETE = "complete"
    EMPTY = "empty"
    SEARCH = "search"
    SELECTION = "selection"


MEANINGS = {
    FailureClass.FAULT: "the infrastructure failed",
    FailureClass.FORMAT: "no action could be read",
    FailureClass.CONTEXT: "the context was full, or longer than the model reads",
    FailureClass.UNSCORED: "no gold to compare with",
    FailureClass.COMPLETE: "all gold was delivered",
    FailureClass.EMPTY: "nothing was delivered",
    FailureClass.SEARCH: "most of what is missing was never seen",
    FailureClass.SELECTION: "most of what is missing was seen and not delivered",
}
_BY_STOP = {
    StopReason.FAULT: FailureClass.FAULT,
    StopReason.FORMAT_LIMIT: FailureClass.FORMAT,
    StopReason.CONTEXT_LIMIT: FailureClass.CONTEXT,
    StopReason.CONTEXT_OVERFLOW: FailureClass.CONTEXT,
}


def failure_class(stop: StopReason, outcome: Outcome | None) -> FailureClass:
    """Return the class of an episode by its end and outcome; without an outcome it is unscored."""
    if stop in _BY_STOP:
        return _BY_STOP[stop]
    if outcome is None:
        return FailureClass.UNSCORED
    if outcome.recall >= 1.0:
        return FailureClass.COMPLETE
    if outcome.set_size == 0:
        return FailureClass.EMPTY
    unseen, unselected = 1.0 - outcome.trajectory_recall, outcome.trajectory_recall - outcome.recall
    return FailureClass.SEARCH if unseen >= unselected else FailureClass.SELECTION


def broken(ended: Mapping[StopReason, int], said: Mapping[str, int], faults: Faults) -> dict[str, Any]:
    """Return the account of broken episodes for `metrics.json`: by the word for each end (`BROKEN`), their number, how
    they are `counted` in the means, and for the infrastructure's the most frequent messages with their numbers.

    Args:
        ended: episodes by their end.
        said: episodes that the infrastructure broke, by its message.
    """
    found: dict[str, Any] = {
        word: {"episodes": ended[stop], "counted": "zero"} for stop, word in BROKEN.items() if ended.get(stop)
    }
    if said:
        reasons = sorted(said.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_REASONS]
        found[BROKEN[StopReason.FAULT]] |= {"counted": faults, "reasons": dict(reasons)}
    return found


def broken_lines(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the account of broken episodes for a reader: how many of all, and why with how they count."""
    for word, each in metrics.get("broken", {}).items():
        counted = "counted as 0" if each["counted"] == "zero" else "left out of the means"
        yield f"{each['episodes']:,} of {metrics['episodes']:,}", f"{word}, {counted}"


def fault_count(metrics: Mapping[str, Any]) -> int:
    """Return the number of episodes that the infrastructure broke."""
    return int(metrics["failures"]["infra_error"])


def fault_reasons(metrics: Mapping[str, Any]) -> dict[str, int]:
    """Return the most frequent messages of the infrastructure's faults, with the number of episodes of each."""
    return dict(metrics.get("broken", {}).get(BROKEN[StopReason.FAULT], {}).get("reasons", {}))
