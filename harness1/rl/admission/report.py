"""Report the check of a task set: a judgement of each task, and the earnings of each policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import msgspec

from harness1.data.leaks import Selection
from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.records import Record
from harness1.reward import by_term
from harness1.rl.admission.judgement import ORACLE, TaskAdmission, Trial

REPORT = "report.json"
README = "README.md"
ORDER = ("oracle", "scripted", "stop-at-once", "curate-everything", "tool-spammer")
"""The order in which a reward should rank policies, best first."""

Trials = Mapping[str, Mapping[str, Sequence[Trial]]]
"""By task, then by policy."""


class PolicyEarnings(Record):
    """The average earnings of a policy over the tasks."""

    policy: str
    reward: float
    score: float
    """Over the tasks that have scores."""
    recall: float
    precision: float
    set_size: float
    terms: dict[str, float]
    """Mean contribution of each term of the reward; an override replaces all other terms."""
    lives_on: str = ""
    """The term that contributed most; empty if none contributed."""


class PairOrder(Record):
    """The number of tasks on which two policies' recalls differ, and on which the better one by `ORDER` earned more."""

    better: str
    worse: str
    tasks: int
    right: int


class AdmissionReport(Record, kw_only=True):
    """The content of `report.json`."""

    dataset: str
    split: str
    recipe: str
    reward_hash: str
    env_hash: str
    tasks: tuple[TaskAdmission, ...]
    policies: tuple[PolicyEarnings, ...]
    pairs: tuple[PairOrder, ...]
    """Each pair of `ORDER`."""
    ranked: tuple[int, int]
    """The number of tasks with all pairs of different recall in order, and the number of tasks with such a pair."""
    selection: Selection | None = None
    """How the tasks were chosen from the split; None if all were taken."""

    @property
    def reasons(self) -> dict[str, int]:
        """The number of tasks rejected for each reason; a task may have several."""
        return dict(Counter(reason for task in self.tasks for reason in task.rejected))

    @property
    def easiest(self) -> PolicyEarnings:
        """Return the earnings of the best policy that does not think: the larger its score, the less can be learned."""
        return max((each for each in self.policies if each.policy != ORACLE), key=lambda each: each.score)

    def admitted(self, headroom: float = 0.0) -> list[str]:
        """Return the ids of the tasks that are not rejected and have at least this headroom, in their order."""
        return [task.task_id for task in self.tasks if not task.rejected and task.headroom >= headroom]


def earnings(policy: str, trials: Trials, judged: Sequence[TaskAdmission]) -> PolicyEarnings:
    """Average a policy over the tasks on which it was rewarded."""
    found = [by_policy[policy][0] for by_policy in trials.values()]
    rewards = [each.reward for each in found if each.reward is not None]
    contributed = [by_term(reward) for reward in rewards]
    names = dict.fromkeys(name for each in contributed for name in each)
    terms = {name: _mean([each.get(name, 0.0) for each in contributed]) for name in names}
    largest = max(terms, key=lambda name: terms[name], default="")
    return PolicyEarnings(
        policy=policy,
        reward=_mean([reward.total for reward in rewards]),
        score=_mean([task.scores[policy] for task in judged if task.scores]),
        recall=_mean([each.outcome.recall for each in found]),
        precision=_mean([each.outcome.precision for each in found]),
        set_size=_mean([float(each.outcome.set_size) for each in found]),
        terms=terms,
        lives_on=largest if largest and terms[largest] > 0.0 else "",
    )


def ranking(trials: Trials) -> tuple[tuple[PairOrder, ...], tuple[int, int]]:
    """Return the `pairs` and `ranked` of a report."""
    orders = [_orders(by_policy) for by_policy in trials.values()]
    pairs = []
    for pair in combinations(ORDER, 2):
        found = [order[pair] for order in orders if pair in order]
        pairs.append(PairOrder(*pair, len(found), sum(found)))
    return tuple(pairs), (sum(all(order.values()) for order in orders if order), sum(map(bool, orders)))


def read_report(path: Path) -> AdmissionReport:
    """Read the report of a check, by its folder or its file.

    Raises:
        UsageError: there is none.
        SchemaError: it is damaged.
    """
    file = path / REPORT if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=AdmissionReport)
    except OSError as error:
        raise UsageError(f"{file} is not a report of `harness1 rl check`: {error.strerror}") from error
    except MALFORMED as error:
        raise SchemaError(f"{file} is not a report of `harness1 rl check`: {error}") from error


def readme(report: AdmissionReport, headroom: float) -> str:
    """Write the report as Markdown."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items()) or "none"
    right, differing = report.ranked
    lines = [
        f"# Admission of {report.dataset}, {report.split}, under `{report.recipe}`",
        "",
        f"{len(report.tasks)} tasks, {len(report.admitted())} admitted, {len(report.admitted(headroom))} of them with"
        f" headroom of at least {headroom:g}. Reasons to reject: {reasons}.",
        "",
        *([f"Not judged: {report.selection.line}.", ""] if report.selection and report.selection.line else []),
        "| policy | reward | score | recall | precision | set size | lives on |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in report.policies:
        figures = (each.reward, each.score, each.recall, each.precision)
        shown = " | ".join(f"{figure:.3f}" for figure in figures)
        lines.append(f"| {each.policy} | {shown} | {each.set_size:.1f} | {lives_on(each)} |")
    lines += ["", f"In the order {' > '.join(ORDER)} on {right} of {differing} tasks where recalls differ.", ""]
    lines += ["| better | worse | right | tasks |", "|---|---|---|---|"]
    lines += [f"| {pair.better} | {pair.worse} | {pair.right} | {pair.tasks} |" for pair in report.pairs]
    return "\n".join(lines) + "\n"


def lives_on(found: PolicyEarnings) -> str:
    """Format the largest term of a policy with its mean contribution."""
    return f"{found.lives_on} {found.terms[found.lives_on]:+.2f}" if found.lives_on else "nothing"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _orders(by_policy: Mapping[str, Sequence[Trial]]) -> dict[tuple[str, str], bool]:
    """Map each pair of policies with different recall to True if the better one earned more."""
    found = {policy: by_policy[policy][0] for policy in ORDER}
    totals = {policy: each.reward.total for policy, each in found.items() if each.reward is not None}
    return {
        (better, worse): totals[better] > totals[worse]
        for better, worse in combinations(ORDER, 2)
        if better in totals and worse in totals and found[better].outcome.recall != found[worse].outcome.recall
    }
