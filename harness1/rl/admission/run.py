"""Check a task set: every policy plays it into its own run folder, then each task is judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from harness1.config import Config, Data
from harness1.data.leaks import TEST, Selection, ShareName, open_filter
from harness1.data.source import Source
from harness1.env.environment import env_hash
from harness1.episodes.jobs import OnEpisode
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.policy.registry import open_policy
from harness1.records import Episode, Gold, RewardRecord, Task
from harness1.rl.admission.judgement import ORACLE, POLICIES, TWICE, Trial, admission_of, ideal, scoring_of, trial
from harness1.rl.admission.report import README, REPORT, AdmissionReport, Trials, earnings, ranking, read_report, readme
from harness1.runs.files import Stage, clear, refuse_foreign, refuse_other, under_way, write_atomically, write_json
from harness1.runs.folder import clear_run
from harness1.runs.journal import read_episodes

VERB = "rl check"
RUNS = "policies"
"""The folder of the policies' runs, each of which can be viewed, replayed and resumed like any other."""


@dataclass(frozen=True)
class Check:
    """A check to run; `tasks` come with their gold."""

    dataset: str
    split: str
    tasks: Sequence[Task]
    index: str
    config: Config
    seed: int = 0
    student: str = ""
    """As in `EpisodeSetup`: the tokenizer that counts the policies' contexts."""
    selection: Selection | None = None
    """How the tasks were chosen; the report keeps it."""

    def evaluation(self, policy: str) -> Evaluation:
        """Return the evaluation of one policy."""
        samples = 2 if policy == TWICE else 1
        played = self.dataset, self.split, self.tasks, self.index, policy, self.config, samples, self.seed
        return Evaluation(*played, student=self.student)

    def stage(self) -> Stage:
        """Return the card of the folder before any work; equal work has an equal card."""
        inputs = {
            **self.evaluation(TWICE).stage().inputs,
            "policy": {name: open_policy(name, {}).hash for name in POLICIES},
        }
        chosen = [] if self.selection is None else [msgspec.to_builtins(self.selection)]
        return Stage(VERB, inputs, hashes={"reward": self.config.reward_hash}, outputs={"selections": chosen})


def tasks_to_check(
    source: Source,
    split: str,
    limit: int,
    data: Data,
    share: ShareName = "",
    against: Sequence[str] = (),
    excluded: Collection[tuple[str, str]] = frozenset(),
) -> tuple[list[Task], Selection | None]:
    """Return the first `limit` tasks of a split (0 for all) that a training may learn from, and the account of the
    choice; of the test split, from which nothing is learned, all tasks.

    Raises:
        UsageError: there is no such split, an evaluation set does not exist, or no task is left.
    """
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
    job: Check,
    out: Path,
    *,
    force: bool = False,
    on_policy: Callable[[str, int, int], None] = lambda _policy, _finished, _total: None,
    on_episode: OnEpisode = lambda _: None,
) -> AdmissionReport:
    """Play all policies over the tasks and write the report; an existing report is read and left unchanged. A check
    that was stopped, or that faults broke, is resumed.

    Args:
        on_policy: called as a policy begins, with the numbers of its finished episodes and of all its episodes.

    Raises:
        UsageError: there is no task, a task has no gold, or the folder holds something else.
        SchemaError: the folder is damaged.
        InfrastructureFault: a worker died; run again to resume.
    """
    if not job.tasks:
        raise UsageError(f"{job.dataset} has no tasks in split {job.split}")
    stage = job.stage()
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
        for policy in POLICIES:
            evaluate(job.evaluation(policy), out / RUNS / policy, partial(on_policy, policy), on_episode)
        report = _report(job, out)
        write_json(out / REPORT, report)
        write_atomically(out / README, readme(report, job.config.rl.headroom).encode())
        gates = {"tasks": len(report.tasks), "admitted": len(report.admitted()), "rejected": report.reasons}
        stage.write(out, status="finished", gates=gates)
    return report


def _report(job: Check, out: Path) -> AdmissionReport:
    scoring = scoring_of(job.config)
    golds = {task.task_id: task.gold for task in job.tasks if task.gold is not None}
    trials: dict[str, dict[str, list[Trial]]] = {task_id: {} for task_id in golds}
    best: dict[str, RewardRecord | None] = {}
    for policy in POLICIES:
        for episode, gold in _latest(out / RUNS / policy, golds):
            trials[episode.task.task_id].setdefault(policy, []).append(trial(episode, gold, scoring))
            if policy == ORACLE:
                perfect = ideal(episode, gold, job.config.env.curation.cap)
                best[episode.task.task_id] = scoring(perfect, gold)
    return reported(job, trials, best)


def reported(job: Check, trials: Trials, best: dict[str, RewardRecord | None]) -> AdmissionReport:
    """Judge every task, and average the policies."""
    tasks = tuple(admission_of(task_id, trials[task_id], best[task_id]) for task_id in trials)
    pairs, ranked = ranking(trials)
    return AdmissionReport(
        dataset=job.dataset,
        split=job.split,
        recipe=job.config.reward.recipe,
        reward_hash=job.config.reward_hash,
        env_hash=env_hash(job.config.env),
        tasks=tasks,
        policies=tuple(earnings(policy, trials, tasks) for policy in POLICIES),
        pairs=pairs,
        ranked=ranked,
        selection=job.selection,
    )


def _latest(folder: Path, golds: dict[str, Gold]) -> Iterator[tuple[Episode, Gold]]:
    """Yield the last episode of each task and sample, read one by one, as memory may not hold all."""
    last = {(episode.task.task_id, episode.sample_idx): line for line, episode in enumerate(read_episodes(folder))}
    kept = set(last.values())
    for line, episode in enumerate(read_episodes(folder)):
        if line in kept:
            yield episode, golds[episode.task.task_id]
