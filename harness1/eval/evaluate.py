"""Evaluation of a policy on the tasks of a dataset, in a run folder that can be resumed, replayed and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import FORMER, Config
from harness1.data.indexing import corpus_of
from harness1.data.open import from_anywhere
from harness1.data.origins import origins_of, searched_origins, united
from harness1.env.pieces import static_piece
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, describe_counter, run_episodes
from harness1.errors import UsageError
from harness1.eval.metrics import MeasuredRun, fault_count
from harness1.eval.outputs import output_names, write_outputs
from harness1.eval.run import SCORE_AGAIN, SCORING, Run, task_hashes
from harness1.eval.statistics import RESAMPLES
from harness1.models.spec import policy_origins
from harness1.plain import digest, file_digest
from harness1.policy.policy import Policy
from harness1.policy.registry import needs_gold
from harness1.records import ChunkId, DocId, Episode, Faults, Status, Task
from harness1.retrieval.index import open_index
from harness1.retrieval.open import absolute_index, is_engine, open_retriever
from harness1.reward import score
from harness1.reward.measures import targets
from harness1.runs import files
from harness1.runs import folder as runs
from harness1.runs.journal import EPISODES, LINES, EpisodeStore, continue_lines, finish, is_unchanged, rewrite_episodes
from harness1.tools.registry import Toolbox

Progress = Callable[[Episode], None]
OnStart = Callable[[int, int], None]
PLAY_AGAIN = "--force plays the run again, and another --out keeps both"
LOOKED_UP = 20  # tasks whose gold is looked up in an index, to check that the index is of their corpus


@dataclass(frozen=True)
class Evaluation:
    """A policy to be played on the tasks of a dataset. `samples`: episodes for each task; sample `i` is played with
    `seed + i`. `reasoned`, `student`, `own`: as in `EpisodeSetup`. `share`: that of the split that the tasks are from,
    for the card. `faults`: how episodes that the infrastructure broke count in the means."""

    dataset: str
    split: str
    tasks: Sequence[Task]
    index: str
    policy: str
    config: Config
    samples: int = 1
    seed: int = 0
    reasoned: bool = False
    student: str = ""
    share: str = ""
    faults: Faults = "exclude"
    own: Policy | None = None

    @property
    def setup(self) -> EpisodeSetup:
        return EpisodeSetup(self.config, self.index, self.policy, self.reasoned, self.student, self.own)

    def jobs(self) -> list[EpisodeJob]:
        return [EpisodeJob(task, sample, self.seed + sample) for sample in range(self.samples) for task in self.tasks]

    @property
    def episodes(self) -> int:
        return self.samples * len(self.tasks)

    def check(self) -> None:
        """Raise UsageError if there is no task, a task has no gold, or the index is of another corpus."""
        if not self.tasks:
            raise UsageError(f"{self.dataset} has no tasks in split {self.split}")
        unit = self.config.index.unit
        golds = [targets(task.task_id, task.gold, unit) for task in self.tasks]
        if is_engine(self.index):
            return
        index = open_index(Path(self.index))
        units = {name for gold in golds[:LOOKED_UP] for target in gold.relevant for name in target}
        if unit == "chunk":
            found = bool(index.positions(map(ChunkId, units)))
        else:
            found = any(index.positions_of(DocId(name)) for name in units)
        if not found:
            corpus = corpus_of(Path(self.index))
            why = f"qrels name documents that the corpus lacks (harness1 data check {self.dataset})"
            if corpus not in (from_anywhere(self.dataset), self.dataset):
                why = f"it is an index of another corpus, {corpus or f'or {why}'}"
            raise UsageError(f"{self.index} holds no gold document of the first tasks of {self.dataset}: {why}")

    def stage(self) -> files.Stage:
        """Return the card of the run; equal work has an equal card. Its `source` is the dataset by an absolute path."""
        retriever = open_retriever(self.index, self.config)
        policy = self.setup.policy_for(self.jobs())
        env = self.setup.environment(retriever, policy)
        names = {"env": env.hash, "policy": policy.hash, "index": retriever.info.index_hash}
        inputs = {
            "dataset": self.dataset,
            "split": self.split,
            "tasks": [task.task_id for task in self.tasks],
            **task_hashes(self.tasks),
            "samples": self.samples,
            "seed": self.seed,
            "reward": self.config.reward_hash,
            **names,
        }
        hashes, chat = describe_counter(env.counter)
        chat |= {"tokenizer": self.student} if self.student else {}
        card = runs.run_stage(self.config, self.policy, inputs, absolute_index(self.index), names | hashes, chat)
        told = {"source": from_anywhere(self.dataset)} | ({"share": self.share} if self.share else {})
        origins = united(origins_of(self.dataset), policy_origins(self.policy), searched_origins(self.index))
        return msgspec.structs.replace(card, outputs={**card.outputs, **told}, origins=origins)

    def facts(self, stage: files.Stage) -> dict[str, Any]:
        """Return the run's part of its provenance; the hash `config` covers all settings but `machine`."""
        env = self.config.env
        hashes = {
            **stage.hashes,
            "reward": self.config.reward_hash,
            "config": self.config.hash,
            "prompt": digest(static_piece(env, Toolbox.of(env)).text),
            "data": digest(self.tasks),
        }
        names = {"dataset": self.dataset, "split": self.split, "policy": self.policy}
        return {**names, "tasks": len(self.tasks), "samples": self.samples, "seed": self.seed, "hashes": hashes}


Play = Callable[[Evaluation, Path], Mapping[str, Any]]


def ensure_run(
    evaluation: Evaluation, out: Path, play: Play | None = None, *, force: bool = False
) -> Mapping[str, Any]:
    """Return the metrics of a run, after playing what is missing by `play`. `force`: begin again."""
    if force:
        runs.clear_run(out)
    return load_finished_metrics(evaluation, out) or (play or evaluate)(evaluation, out)


def evaluate(
    evaluation: Evaluation,
    out: Path,
    on_start: OnStart = lambda _done, _all: None,
    on_episode: Progress = lambda _: None,
    on_torn: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Play the episodes that `out` does not hold yet, then write and return the metrics, shares of 1 unless a name says
    otherwise, with the bounds of 95 % bootstrap intervals over tasks. The same call resumes an interrupted evaluation.
    `on_start`: gets the number of finished episodes and that of all; `on_episode`: each as it finishes. Raises
    UsageError: as `Evaluation.check`, or the folder holds a different run, is written by another process, or cannot be
    written; InfrastructureFault: a worker died."""
    evaluation.check()
    refuse_changed_tasks(evaluation, out)
    stage = runs.refuse_other_run(evaluation.stage(), out)
    # Opened before anything is written, since another process may be using the folder.
    store = EpisodeStore(out)
    with files.under_way(stage, out), store:
        runs.drop_leftovers(out)
        on_torn(store.torn)
        earlier = (episode for episode in runs.episodes_of(stage, out) if episode.status is not Status.INFRA_ERROR)
        done = {(episode.task.task_id, episode.sample_idx) for episode in earlier}
        jobs = [job for job in evaluation.jobs() if (job.task.task_id, job.sample_idx) not in done]
        on_start(evaluation.episodes - len(jobs), evaluation.episodes)

        def keep(episode: Episode) -> None:
            store.append(episode)
            on_episode(episode)

        with runs.keep_provenance(out, evaluation.facts(stage), runs=bool(jobs)):
            try:
                run_episodes(evaluation.setup, jobs, keep)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note("the same command continues where it stopped")
                raise
        return write_metrics(evaluation, stage, out)


def rescore(evaluation: Evaluation, out: Path) -> None:
    """Score the recorded episodes of a run again, with the gold and the reward of an evaluation; `evaluate` then writes
    all that is made of them. Raises UsageError: the policy sees the gold; or the run is another, or is written to."""
    evaluation.check()
    if needs_gold(evaluation.policy):
        raise UsageError(f"{evaluation.policy} sees the gold, and its episodes depend on it: {PLAY_AGAIN}")
    runs.run_config(out, runs.read_run_card(out, scored_again=True))
    refuse_changed_tasks(evaluation, out, besides=SCORING)
    stage = evaluation.stage()
    files.refuse_changed(stage, out, "run", besides=SCORING)
    golds = {task.task_id: task.gold for task in evaluation.tasks}
    with files.writing(out), EpisodeStore(out):
        stage, before = continue_lines(stage, out / EPISODES), files.read_stage(out)
        assert before is not None, "run_config has read it"
        # Until the new card is written, nobody can say which gold the episodes were scored with, so no gold fits.
        outputs = {**before.outputs, LINES: stage.outputs[LINES]}
        before.write(out, status="interrupted", inputs={**before.inputs, "gold": ""}, outputs=outputs)
        rewrite_episodes(out, lambda each: score(each, golds.get(each.task.task_id), evaluation.config))
        runs.restate_provenance(out, evaluation.facts(stage))
        stage.write(out, status="interrupted")


def refuse_changed_tasks(evaluation: Evaluation, out: Path, besides: Sequence[str] = ()) -> None:
    """Raise UsageError if a question, or (unless `besides` has it) the gold, of a run has changed since."""
    found, tasks = files.read_stage(out), [task.task_id for task in evaluation.tasks]
    if found is None or found.inputs.get("tasks") != tasks or not (out / EPISODES).is_file():
        return
    again = PLAY_AGAIN if needs_gold(evaluation.policy) else f"{SCORE_AGAIN}, {PLAY_AGAIN}"
    current, known = task_hashes(evaluation.tasks), found.inputs.keys()
    if {*files.TASK_HASHES} <= known and current == {name: found.inputs[name] for name in files.TASK_HASHES}:
        return
    run = Run(out, found, given=evaluation.tasks)
    run.refuse_other_queries(PLAY_AGAIN)
    if not besides:
        run.refuse_other_gold(again)
    if not besides and "gold" not in known and found.inputs.get("reward") == evaluation.config.reward_hash:
        for each in run.episodes.values():
            task = run.tasks.get(each.task.task_id)
            if each.reward and task and score(each, task.gold, evaluation.config).reward != each.reward:
                shown = f"as task {task.task_id!r} shows"
                raise UsageError(f"{out} was scored with other gold or other rules, {shown}: {again}")


def load_finished_metrics(evaluation: Evaluation, out: Path) -> dict[str, Any] | None:
    """Return the metrics of a run that is complete and unchanged with all its outputs, made with present settings."""
    names = output_names([task.task_id for task in evaluation.tasks], evaluation.samples)
    whole = all((out / name).is_file() for name in (EPISODES, *names)) and evaluation.stage().is_done(out)
    stage, machine = files.read_stage(out) if whole else None, evaluation.config.machine
    if stage is None or not is_unchanged(out / EPISODES):
        return None
    raw = files.read_raw_stage(out)  # where an earlier version may have recorded other resamples
    written = raw.outputs.get("config", {}) if raw else {}
    if written.get("machine", written.get(FORMER, {})).get("bootstrap", RESAMPLES) != RESAMPLES:
        return None
    before = stage.outputs.get("config", {}).get("machine", {})
    now = {"price": list(machine.price)}
    closed = {"episode_bytes": (out / EPISODES).stat().st_size, "metrics": file_digest(out / runs.METRICS)}
    if now != {name: before.get(name) for name in now} or not closed.items() <= stage.outputs.items():
        return None
    metrics = files.find_json(out / runs.METRICS)
    return metrics if metrics and "broken" in metrics and fault_count(metrics) == 0 else None


def write_metrics(evaluation: Evaluation, stage: files.Stage, out: Path) -> dict[str, Any]:
    """Write `metrics.json` and all other outputs of a run folder; close the card for `load_finished_metrics`."""
    tasks = {task.task_id: task for task in evaluation.tasks}
    episodes = runs.episodes_of(stage, out)
    measured = MeasuredRun(episodes, tasks, evaluation.config, finished=True, faults=evaluation.faults)
    metrics = measured.summary(evaluation.seed)
    encoded = write_outputs(out, episodes, measured, evaluation.config, metrics)
    # The pages depend on the closed card, too: remove them first, in case this is interrupted.
    for page in (runs.REPORT, runs.VIEW):
        (out / page).unlink(missing_ok=True)
    notes: dict[str, Any] = {"trec_ids": "percent-encoded"} if encoded else {}
    notes |= {"faults": evaluation.faults} if fault_count(metrics) else {}
    notes |= {"episode_bytes": (out / EPISODES).stat().st_size, "metrics": file_digest(out / runs.METRICS)}
    gates = {"missing": metrics["missing"], "failures": metrics["failures"]}
    finish(stage, out / EPISODES, gates=gates, outputs={**stage.outputs, **notes})
    return metrics
