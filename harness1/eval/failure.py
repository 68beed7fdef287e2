"""The reason, in one word, why an episode fell short; lists can be filtered by it."""

from __future__ import annotations

from enum import StrEnum

from harness1.records import Status
from harness1.reward.outcome import Outcome


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
    FailureClass.CONTEXT: "the context was full",
    FailureClass.UNSCORED: "no gold to compare with",
    FailureClass.COMPLETE: "all gold was delivered",
    FailureClass.EMPTY: "nothing was delivered",
    FailureClass.SEARCH: "most of what is missing was never seen",
    FailureClass.SELECTION: "most of what is missing was seen and not delivered",
}
_BY_STATUS = {
    Status.INFRA_ERROR: FailureClass.FAULT,
    Status.POLICY_ERROR: FailureClass.FORMAT,
    Status.TRUNCATED: FailureClass.CONTEXT,
}


def failure_class(status: Status, outcome: Outcome | None) -> FailureClass:
    """Return the class of an episode by its status and outcome; without an outcome it is unscored."""
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if outcome is None:
        return FailureClass.UNSCORED
    if outcome.recall >= 1.0:
        return FailureClass.COMPLETE
    if outcome.set_size == 0:
        return FailureClass.EMPTY
    unseen, unselected = 1.0 - outcome.trajectory_recall, outcome.trajectory_recall - outcome.recall
    return FailureClass.SEARCH if unseen >= unselected else FailureClass.SELECTION
