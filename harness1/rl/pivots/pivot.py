"""The candidates of a profile: each is a turn of a teacher, with the decision to keep it or not.

Let mu be the share of a reference policy's K samples that the verifier finds right. A turn is kept if 0 < mu < 1
(otherwise no action stands out) and mu < lambda (PivotRL, arXiv 2603.21383).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from harness1.errors import MALFORMED, SchemaError
from harness1.records import Record
from harness1.rl.pivots.rollouts import TurnId
from harness1.runs.journal import read_lines

PIVOTS = "pivots.jsonl"
Split: TypeAlias = Literal["train", "held_out"]
PivotLabel: TypeAlias = Literal["kept", "easy", "all_right", "all_wrong", "expert_fails", "no_room"]
"""The decision on a candidate. `expert_fails`: the verifier finds the expert's own action wrong; `no_room`: the state
exceeds the policy's context."""


class Pivot(Record, kw_only=True):
    """A candidate turn, and the results of the reference policy there."""

    episode_id: str
    turn: int
    task_id: str
    tool: str
    """The expert's."""
    split: Split
    right: int
    """k: the number of samples that the verifier found right."""
    samples: int
    """K; 0 if none were drawn."""
    mean: float
    """mu = k / K."""
    rules: dict[str, int]
    """The number of samples that each rule decided; with `expert_fails`, the rule that refused the expert's action."""
    fate: PivotLabel

    @property
    def turn_id(self) -> TurnId:
        return TurnId(self.episode_id, self.turn)


def label_of(successes: int, samples: int, limit: float) -> PivotLabel:
    """Label a turn: `kept` if some samples are right, some are not, and the share of right ones is below `limit`."""
    if 0 < successes < samples and successes / samples < limit:
        return "kept"
    return "all_wrong" if not successes else "all_right" if successes == samples else "easy"


def read_pivots(folder: Path) -> list[Pivot]:
    """Read the finished candidates of a profile, in the order written, without a torn last line.

    Raises:
        UsageError: the folder holds no profile.
        SchemaError: a line is damaged.
    """
    found = []
    for number, line in read_lines(folder / PIVOTS):
        try:
            found.append(msgspec.json.decode(line, type=Pivot))
        except MALFORMED as error:
            raise SchemaError(f"{folder / PIVOTS}:{number}: not a pivot: {error}") from error
    return found


def counts(pivots: Sequence[Pivot]) -> dict[str, dict[str, Any]]:
    """Count the candidates by label, for all and for each tool of the expert, and the kept ones by split."""
    labels = {name: Counter[str]() for name in ("all", *sorted({each.tool for each in pivots}))}
    for each in pivots:
        labels["all"][each.fate] += 1
        labels[each.tool][each.fate] += 1
    return {
        "fates": {
            name: {"candidates": some.total(), **{label: some[label] for label in get_args(PivotLabel)}}
            for name, some in labels.items()
        },
        "splits": dict(Counter(each.split for each in pivots if each.fate == "kept")),
    }
