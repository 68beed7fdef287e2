"""Judge which tasks are worth training on, by the rewards of policies that should earn nothing, or all. A policy's
score on a task is (r - r_noop) / (r_oracle - r_noop). A task is rejected if the oracle does not come near the reward of
an ideal delivery, if scoring is not stable, or if a policy scores without using any retrieval result. The headroom is
the score that the best simple policy leaves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from harness1.config import Data
from harness1.data.leaks import TEST, Selection, ShareName, open_filter
from harness1.data.source import Source
from harness1.env.environment import env_hash
from harness1.episodes.jobs import OnEpisode
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.policy.registry import open_policy
from harness1.records import Curated, Episode, Gold, Record, RewardRecord, Status, StopReason, Task
from harness1.reward import by_term, composite
from harness1.reward.measures import Outcome, measure_outcome, targets
from harness1.runs.files import (
    Stage,
    clear,
    read_record,
    refuse_foreign,
    refuse_other,
    under_way,
    write_atomically,
    write_json,
)
from harness1.runs.folder import clear_run
from harness1.runs.journal import read_episodes

NO_OP, ORACLE, TWICE = "no-op", "oracle", "scripted"  # the ends of the scale; the policy that must do the same twice
BLIND = (NO_OP, "id-inventor")  # they ignore the results of searches
SEARCHING = ("stop-at-once", "single-shot", "random", "query-repeater", "tool-spammer", "curate-everything", TWICE)
POLICIES = (*BLIND, *SEARCHING, ORACLE)
ATTAINED = 0.95  # the share of the ideal that the oracle must attain
LEAKED = 0.05  # the score of a policy that ignores results at which a task is rejected as leaked
HEADROOM = 0.15  # at least, for a task to be sampled

Reason = Literal["fault", "flat", "unattained", "unstable", "leaked"]
"""`fault`: the infrastructure broke an episode. `flat`: an ideal delivery earns no more than an empty one."""
Scoring = Callable[[Episode, Gold], RewardRecord | None]


class TaskAdmission(Record):
    """The judgement of one task; it is rejected if there is any reason."""

    task_id: str
    rejected: tuple[Reason, ...] = ()
    headroom: float = 0.0  # 1 - the best score of the searching policies
    attained: float = 0.0  # the oracle's gain over doing nothing, as a share of the gain of an ideal delivery
    scores: dict[str, float] = {}  # by policy; empty if the oracle gains nothing


class Trial(NamedTuple):
    """The outcome of an episode, and its reward, computed twice."""

    outcome: Outcome
    curated: tuple[Curated, ...]
    reward: RewardRecord | None
    again: RewardRecord | None


def trial(episode: Episode, gold: Gold, scoring: Scoring) -> Trial:
    """Score an episode, twice; raise UsageError if the gold is empty."""
    return Trial(measure_outcome(episode, gold), episode.curated, scoring(episode, gold), scoring(episode, gold))


def ideal(episode: Episode, gold: Gold, cap: int) -> Episode:
    """Return the episode as if it had delivered exactly one unit for each target, at most `cap`, the answer's first."""
    wanted = targets(episode.task.task_id, gold, episode.unit)
    delivered = {entry.unit_id for entry in episode.curated}
    every = (*wanted.answer, *wanted.relevant)
    members = (min(target, key=lambda unit: (unit not in delivered, unit)) for target in every)
    chosen = list(dict.fromkeys(members))[:cap]  # a delivered unit if possible, so that nothing counts twice
    return msgspec.structs.replace(
        episode,
        curated=tuple(Curated(unit, "very_high", rank) for rank, unit in enumerate(chosen, 1)),
        pool=tuple(dict.fromkeys((*episode.pool, *chosen))),
        stop_reason=StopReason.END_SEARCH,
        status=Status.COMPLETED,
    )


def admission_of(task_id: str, trials: Mapping[str, Sequence[Trial]], best: RewardRecord | None) -> TaskAdmission:
    """Judge a task by one trial of each of `POLICIES`, two of `TWICE`, and the reward of the ideal delivery."""
    played = [each for found in trials.values() for each in found]
    rewards = {policy: found[0].reward.total for policy, found in trials.items() if found[0].reward is not None}
    if best is None or any(each.reward is None for each in played):
        return TaskAdmission(task_id, ("fault",))
    nothing, gained = rewards[NO_OP], rewards[ORACLE] - rewards[NO_OP]
    reachable = best.total - nothing
    scores = {policy: (total - nothing) / gained for policy, total in rewards.items()} if gained > 0.0 else {}
    attained = gained / reachable if reachable > 0.0 else 0.0
    first, *more = trials[TWICE]
    holds: dict[Reason, bool] = {
        "flat": reachable <= 0.0,
        "unattained": reachable > 0.0 and attained < ATTAINED,
        "unstable": any(each.reward != each.again for each in played)
        or any((each.curated, each.reward) != (first.curated, first.reward) for each in more),
        "leaked": any(scores.get(policy, 0.0) >= LEAKED for policy in BLIND),
    }
    headroom = 1.0 - max(scores[policy] for policy in SEARCHING) if scores else 0.0
    return TaskAdmission(task_id, tuple(reason for reason in holds if holds[reason]), headroom, attained, scores)


VERB, REPORT, README = "rl check", "report.json", "README.md"
RUNS = "policies"  # the folder of the policies' runs, each of which can be viewed, replayed and resumed like any other
ORDER = ("oracle", "scripted", "stop-at-once", "curate-everything", "tool-spammer")  # of rewards, best first

Trials = Mapping[str, Mapping[str, Sequence[Trial]]]  # by task, then by policy
COLUMNS = ("policy", "reward", "score", "recall", "precision", "set size", "lives on")


class PolicyEarnings(Record):
    """The average earnings of a policy over the tasks; `score` over those that have scores."""

    policy: str
    reward: float
    score: float
    recall: float
    precision: float
    set_size: float
    terms: dict[str, float]  # mean contribution of each term of the reward; an override replaces all other terms
    lives_on: str = ""  # the term that contributed most; empty if none contributed

    def list_cells(self) -> list[str]:
        figures = [f"{figure:.3f}" for figure in (self.reward, self.score, self.recall, self.precision)]
        largest = f"{self.lives_on} {self.terms[self.lives_on]:+.2f}" if self.lives_on else "nothing"
        return [self.policy, *figures, f"{self.set_size:.1f}", largest]


class PairOrder(Record):
    """The number of tasks on which two policies' recalls differ, and on which the better one by `ORDER` earned more."""

    better: str
    worse: str
    tasks: int
    right: int


class AdmissionReport(Record, kw_only=True):
    """The content of `report.json`. `ranked` is the number of tasks with all pairs of different recall in order, and of
    those with such a pair; `selection` tells how the tasks were chosen from the split, None if all were taken."""

    dataset: str
    split: str
    recipe: str
    reward_hash: str
    env_hash: str
    tasks: tuple[TaskAdmission, ...]
    policies: tuple[PolicyEarnings, ...]
    pairs: tuple[PairOrder, ...]  # each pair of `ORDER`
    ranked: tuple[int, int]
    selection: Selection | None = None

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(reason for task in self.tasks for reason in task.rejected))

    @property
    def easiest(self) -> PolicyEarnings:
        """The earnings of the best policy that does not think: the larger its score, the less can be learned."""
        return max((each for each in self.policies if each.policy != ORACLE), key=lambda each: each.score)

    def list_admitted(self, headroom: float = 0.0) -> list[str]:
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


def read_report(path: Path) -> AdmissionReport:
    """Read the report of a check, by its folder or its file; UsageError if there is none, SchemaError if damaged."""
    file = path / REPORT if path.is_dir() else path
    report = read_record(file, AdmissionReport, "a report of `harness1 rl check`")
    if report is None:
        raise UsageError(f"{file} is not a report of `harness1 rl check`: there is no such file")
    return report


def readme(report: AdmissionReport) -> str:
    """Write the report as Markdown."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items()) or "none"
    right, differing = report.ranked
    lines = [
        f"# Admission of {report.dataset}, {report.split}, under `{report.recipe}`",
        "",
        f"{len(report.tasks)} tasks, {len(report.list_admitted())} admitted, {len(report.list_admitted(HEADROOM))} of"
        f" them with headroom of at least {HEADROOM:g}. Reasons to reject: {reasons}.",
        "",
        *([f"Not judged: {report.selection.line}.", ""] if report.selection and report.selection.line else []),
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *(f"| {' | '.join(each.list_cells())} |" for each in report.policies),
    ]
    lines += ["", f"In the order {' > '.join(ORDER)} on {right} of {differing} tasks where recalls differ.", ""]
    lines += ["| better | worse | right | tasks |", "|---|---|---|---|"]
    lines += [f"| {pair.better} | {pair.worse} | {pair.right} | {pair.tasks} |" for pair in report.pairs]
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def tasks_to_check(
    source: Source,
    split: str,
    limit: int,
    data: Data,
    share: ShareName = "",
    against: Sequence[str] = (),
    excluded: Collection[tuple[str, str]] = frozenset(),
) -> tuple[list[Task], Selection | None]:
    """Return the first `limit` tasks of a split (0 for all) that a training may learn from, or any of the test split,
    and the account of the choice; raise UsageError if there is no such split or evaluation set, or no task is left."""
    tasks = source.tasks(split)
    if split == TEST:
        return tasks[: limit or None], None
    taught = {(source.name, split)}
    sieve = open_filter(data, [source], taught, share=share, against=against, excluded=excluded)
    kept, account = sieve.select(source.name, split, tasks)
    if tasks and not kept:
        raise UsageError(f"there is no task to check: {account.line}")
    kept = kept[: limit or None]
    return kept, msgspec.structs.replace(account, learned=tuple(task.task_id for task in kept))


def check(
    job: Evaluation,
    out: Path,
    selection: Selection | None = None,
    *,
    force: bool = False,
    on_policy: Callable[[str, int, int], None] = lambda _policy, _finished, _total: None,
    on_episode: OnEpisode = lambda _: None,
) -> AdmissionReport:
    """Play all policies as an evaluation of one, and write the report, which keeps the `selection`; a check that was
    stopped, or that faults broke, is resumed. `on_policy` is called as a policy begins, with the numbers of its
    finished episodes and of all. Raise UsageError if there is no task, a task has no gold, or the folder holds
    something else; SchemaError if the folder is damaged; InfrastructureFault if a worker died."""
    if not job.tasks:
        raise UsageError(f"{job.dataset} has no tasks in split {job.split}")
    evaluations = {policy: replace(job, policy=policy, samples=1 + (policy == TWICE)) for policy in POLICIES}
    inputs = evaluations[TWICE].stage().inputs | {"policy": {name: open_policy(name, {}).hash for name in POLICIES}}
    chosen = [] if selection is None else [msgspec.to_builtins(selection)]
    stage = Stage(VERB, inputs, hashes={"reward": job.config.reward_hash}, outputs={"selections": chosen})
    if force:
        refuse_foreign(out, VERB)
        for policy in POLICIES:
            clear_run(out / RUNS / policy)
        clear(out, VERB, REPORT, README, keep_card=True)
    else:
        refuse_other(stage, out, "check")
    if stage.is_done(out) and (out / REPORT).is_file() and "fault" not in read_report(out).reasons:
        return read_report(out)
    with under_way(stage, out):
        for policy, evaluation in evaluations.items():
            evaluate(evaluation, out / RUNS / policy, partial(on_policy, policy), on_episode)
        report = judge(job, selection, *_score_runs(job, out))
        write_json(out / REPORT, report)
        write_atomically(out / README, readme(report).encode())
        gates = {"tasks": len(report.tasks), "admitted": len(report.list_admitted()), "rejected": report.reasons}
        stage.write(out, status="finished", gates=gates)
    return report


def _score_runs(job: Evaluation, out: Path) -> tuple[Trials, dict[str, RewardRecord | None]]:
    def scoring(episode: Episode, gold: Gold) -> RewardRecord | None:
        return composite(measure_outcome(episode, gold), episode, job.config, gold)

    golds = {task.task_id: task.gold for task in job.tasks if task.gold is not None}
    trials: dict[str, dict[str, list[Trial]]] = {task_id: {} for task_id in golds}
    best: dict[str, RewardRecord | None] = {}
    for policy in POLICIES:
        run = out / RUNS / policy
        last = {(each.task.task_id, each.sample_idx): line for line, each in enumerate(read_episodes(run))}
        kept = set(last.values())
        for episode in (each for line, each in enumerate(read_episodes(run)) if line in kept):
            task_id, gold = episode.task.task_id, golds[episode.task.task_id]
            trials[task_id].setdefault(policy, []).append(trial(episode, gold, scoring))
            if policy == ORACLE:
                best[task_id] = scoring(ideal(episode, gold, job.config.env.curation.cap), gold)
    return trials, best


def judge(
    job: Evaluation, selection: Selection | None, trials: Trials, best: dict[str, RewardRecord | None]
) -> AdmissionReport:
    """Judge every task, and average the policies."""
    tasks = tuple(admission_of(task_id, trials[task_id], best[task_id]) for task_id in trials)
    pairs, in_order = [], defaultdict[str, list[bool]](list)  # by task: is the better of each pair paid more?
    for better, worse in combinations(ORDER, 2):
        found = []
        for task_id, by_policy in trials.items():
            one, other = by_policy[better][0], by_policy[worse][0]
            if one.reward and other.reward and one.outcome.recall != other.outcome.recall:
                found.append(one.reward.total > other.reward.total)
                in_order[task_id].append(found[-1])
        pairs.append(PairOrder(better, worse, len(found), sum(found)))
    return AdmissionReport(
        dataset=job.dataset,
        split=job.split,
        recipe=job.config.reward.recipe,
        reward_hash=job.config.reward_hash,
        env_hash=env_hash(job.config.env),
        tasks=tasks,
        policies=tuple(earnings(policy, trials, tasks) for policy in POLICIES),
        pairs=tuple(pairs),
        ranked=(sum(map(all, in_order.values())), len(in_order)),
        selection=selection,
    )
