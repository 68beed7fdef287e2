"""What a check of a task set found: for each task whether it is worth training on, for each policy what it lives on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import msgspec

from harness1.errors import SchemaError, UsageError
from harness1.records import Record
from harness1.reward.composite import by_term
from harness1.rl.admission.judgement import TaskAdmission, Trial

REPORT = "report.json"
README = "README.md"
ORDER = ("oracle", "scripted", "stop-at-once", "curate-everything", "tool-spammer")
"""How a reward should rank policies, best first."""

Trials = Mapping[str, Mapping[str, Sequence[Trial]]]
"""By task, then by policy."""


class PolicyEarnings(Record):
    """What a policy earned on average over the tasks."""

    policy: str
    reward: float
    score: float
    """Over the tasks that have scores."""
    recall: float
    precision: float
    set_size: float
    terms: dict[str, float]
    """Mean contribution of each term of the reward; an override is a term of its own, and the only one then."""
    lives_on: str = ""
    """The term that contributed most; empty where none contributed anything."""


class PairOrder(Record):
    """On how many of the tasks where two policies' recalls differ the better one, by `ORDER`, earned more."""

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
    """Tasks on which all pairs whose recalls differ are in order, of the tasks where some do."""

    @property
    def reasons(self) -> dict[str, int]:
        """How many tasks were rejected, for each reason; a task may have several."""
        return dict(Counter(reason for task in self.tasks for reason in task.rejected))

    def admitted(self, headroom: float = 0.0) -> list[str]:
        """The ids of the tasks that were not rejected and leave so much to be gained, in their order."""
        return [task.task_id for task in self.tasks if not task.rejected and task.headroom >= headroom]


def earnings(policy: str, trials: Trials, judged: Sequence[TaskAdmission]) -> PolicyEarnings:
    """The means of a policy over the tasks on which it was rewarded."""
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
    """The `pairs` and `ranked` of a report."""
    orders = [_orders(by_policy) for by_policy in trials.values()]
    pairs = []
    for pair in combinations(ORDER, 2):
        found = [order[pair] for order in orders if pair in order]
        pairs.append(PairOrder(*pair, len(found), sum(found)))
    return tuple(pairs), (sum(all(order.values()) for order in orders if order), sum(map(bool, orders)))


def read_report(path: Path) -> AdmissionReport:
    """The report of a check, by its folder or its file.

    Raises:
        UsageError: there is none.
        SchemaError: it is damaged.
    """
    file = path / REPORT if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=AdmissionReport)
    except OSError as error:
        raise UsageError(f"{file} is no report of `harness1 rl check`: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SchemaError(f"{file} is no report of `harness1 rl check`: {error}") from error


def admitted_tasks(path: Path, headroom: float) -> frozenset[str]:
    """The ids of the tasks that a check admits, with at least so much headroom.

    Raises:
        UsageError: there is no such report.
        SchemaError: it is damaged.
    """
    return frozenset(read_report(path).admitted(headroom))


def readme(report: AdmissionReport, headroom: float) -> str:
    """The report for people, as Markdown."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items()) or "none"
    right, differing = report.ranked
    lines = [
        f"# Admission of {report.dataset}, {report.split}, under `{report.recipe}`",
        "",
        f"{len(report.tasks)} tasks, {len(report.admitted())} admitted, {len(report.admitted(headroom))} of them with"
        f" headroom of at least {headroom:g}. Reasons to reject: {reasons}.",
        "",
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
    """The largest term of a policy, with its mean contribution."""
    return f"{found.lives_on} {found.terms[found.lives_on]:+.2f}" if found.lives_on else "nothing"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _orders(by_policy: Mapping[str, Sequence[Trial]]) -> dict[tuple[str, str], bool]:
    """For each pair whose recalls differ, whether the better policy earned more."""
    found = {policy: by_policy[policy][0] for policy in ORDER}
    totals = {policy: each.reward.total for policy, each in found.items() if each.reward is not None}
    return {
        (better, worse): totals[better] > totals[worse]
        for better, worse in combinations(ORDER, 2)
        if better in totals and worse in totals and found[better].outcome.recall != found[worse].outcome.recall
    }
