"""Gates between the stages of a recipe: what a stage made is measured, and a bound decides whether the next one starts.

Every gate gives one number. A gate that counts faults has the bound 0; NaN passes no gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

from harness1.errors import UsageError
from harness1.recipe import measures
from harness1.recipe.stage_case import StageCase
from harness1.records import Record

Measure = Callable[[StageCase], float | None]

TRAINED = ("sft train", "rl train")
PLAYED = ("eval", "sft collect")
DATASETS = ("tasks make", "data copy")
INDEX, DATA, ROWS = "index check {out}", "data check {out}", "sft build RUN --out {out} --force"
COMPARED = "compare RUN RUN --metric reward --out {out}"


class Finding(Record):
    """What a gate found."""

    gate: str
    value: float | None
    """None: not finite, which JSON has no word for."""
    bound: float
    passed: bool
    says: str
    look: str = ""
    """The command to look closer with; empty where the gate has passed."""


@dataclass(frozen=True)
class Gate:
    """One check of what a stage made."""

    measure: Measure
    """Returns the value, or None where the gate does not apply."""
    says: str
    verbs: tuple[str, ...]
    """The verbs whose stages it guards."""
    bound: float | None = None
    """None: it guards only stages that name it."""
    at_least: bool = False
    """The bound is the smallest value that passes, not the largest."""
    look: str = "view {out}"
    """The command to look closer, with `{out}` for the stage's folder."""

    def judge(self, name: str, case: StageCase, bound: float) -> Finding | None:
        """Measure, and compare with a bound; None where the gate does not apply."""
        look = "harness1 " + self.look.replace("{out}", str(case.folder))
        try:
            value = self.measure(case)
        except UsageError as error:  # what the stage wrote cannot be read
            return Finding(name, None, bound, False, f"{self.says} ({error})", look)
        if value is None:
            return None
        passed = value >= bound if self.at_least else value <= bound
        return Finding(name, value if isfinite(value) else None, bound, passed, self.says, "" if passed else look)


GATES: Mapping[str, Gate] = {
    "documents": Gate(measures.documents, "documents in the index", ("index",), 1, at_least=True, look=INDEX),
    "damaged": Gate(measures.damaged, "damaged stretches of the index", ("index",), 0, look=INDEX),
    "tasks": Gate(measures.training_tasks, "tasks to train on", DATASETS, 1, at_least=True, look=DATA),
    "shared_gold": Gate(measures.shared_gold, "gold sets in more than one split", DATASETS, 0, look=DATA),
    "faults": Gate(measures.faults, "episodes broken by the infrastructure", PLAYED, 0),
    "terms": Gate(measures.wrong_rewards, "rewards that are not the sum of their terms", (*PLAYED, "rl train"), 0),
    "valid": Gate(measures.valid_actions, "share of valid actions", ("sft collect",), 0.5, at_least=True),
    "recall": Gate(measures.recall, "mean curated recall", ("sft collect",), 0.3, at_least=True),
    "oracle": Gate(measures.oracle_recall, "mean curated recall of the oracle", ("eval",), 0.95, at_least=True),
    "rows": Gate(measures.rows, "rows to train on", ("sft build",), 1, at_least=True, look=ROWS),
    "masks": Gate(measures.wrong_masks, "rows and files whose mask is wrong", ("sft build",), 0, look=ROWS),
    "tokenizer": Gate(measures.foreign_tokenizers, "tokenizers other than the model's", TRAINED, 0),
    "admitted": Gate(measures.admitted, "share of tasks worth training on", ("rl check",), 0.02, at_least=True),
    "finite": Gate(measures.not_finite, "numbers in the training log that are not finite", TRAINED, 0),
    "origin": Gate(measures.foreign_origins, "checkpoints made from another model", TRAINED, 0),
    "progress": Gate(measures.progress, "gain in the held-out metric since the start", TRAINED, 0.0, at_least=True),
    "start": Gate(measures.start_k3, "mean k3 between sampler and trainer at the start", ("rl train",), 5e-3),
    "better": Gate(
        measures.least_lead, "least lead in reward, lower end of 95 %", ("compare",), at_least=True, look=COMPARED
    ),
    "signal": Gate(measures.zero_variance, "share of groups whose rewards are all equal", ("rl train",), 0.9),
}
"""Every gate, by the name that recipes call it."""


def gates_of(verb: str, chosen: Mapping[str, float | bool]) -> Iterator[tuple[str, Gate, float]]:
    """Yield the gates of a stage, with their names and bounds.

    Args:
        verb: the verb of the stage.
        chosen: the stage's own bounds; false leaves a gate out, true keeps its default.
    """
    for name, gate in GATES.items():
        bound = chosen.get(name, True)
        if bound is False or (verb not in gate.verbs and name not in chosen):
            continue
        limit = gate.bound if bound is True else float(bound)
        if limit is not None:
            yield name, gate, limit


def judged(case: StageCase, chosen: Mapping[str, float | bool]) -> list[Finding]:
    """Return what the gates of a finished stage found, in order."""
    findings = (gate.judge(name, case, bound) for name, gate, bound in gates_of(case.verb, chosen))
    return [each for each in findings if each is not None]
