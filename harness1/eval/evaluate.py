"""Evaluation: a policy over the tasks of a dataset, into a run folder that can be resumed, replayed and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config
from harness1.data.source import from_anywhere
from harness1.errors import UsageError
from harness1.eval.outcome import targets
from harness1.eval.summary import summarise
from harness1.policy.formats.chat_format import ChatFormat
from harness1.records import Episode, Task
from harness1.retrieval.engines import open_retriever
from harness1.run_folder import METRICS, refuse_other_run, run_stage
from harness1.runner import Bench, Job, run_episodes
from harness1.stage import Stage, marked, write_atomically
from harness1.store import EpisodeStore, finished_keys, latest_episodes

Progress = Callable[[Episode], None]


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated. `tasks` carry their gold; `samples` episodes are run for each."""

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
    """As of a `Bench`: how a teacher is asked, and in whose format its episodes are recorded."""

    @property
    def bench(self) -> Bench:
        return Bench(self.config, self.index, self.policy, self.reasoned, self.student)

    def jobs(self) -> list[Job]:
        return [Job(task, sample, self.seed + sample) for sample in range(self.samples) for task in self.tasks]

    def stage(self) -> Stage:
        """The card of the run; equal work has an equal card. Its `source` names the dataset from anywhere."""
        retriever = open_retriever(self.index, self.config)
        policy = self.bench.policy_for(self.jobs())
        env = self.bench.environment(retriever, policy)
        names = {"env": env.hash, "policy": policy.hash, "index": retriever.info.index_hash}
        inputs = {
            "dataset": self.dataset,
            "split": self.split,
            "tasks": [task.task_id for task in self.tasks],
            "samples": self.samples,
            "seed": self.seed,
            "reward": self.config.reward_hash,
            **names,
        }
        hashes = {**names, "counter": env.counter.hash}
        spoken = {"tokenizer": self.student} if self.student else {}
        if isinstance(env.counter, ChatFormat):
            hashes["tokenizer"] = env.counter.tokenizer.hash
            spoken["format"] = env.counter.name
        card = run_stage(self.config, self.policy, inputs, self.index, hashes, spoken)
        return msgspec.structs.replace(card, outputs={**card.outputs, "source": from_anywhere(self.dataset)})


def evaluate(
    evaluation: Evaluation,
    out: Path,
    on_start: Callable[[int, int], None],
    on_episode: Progress,
    on_torn: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Run what is not finished yet, then write and return the metrics.

    Args:
        on_start: called once with the number of finished and of all episodes.
        on_episode: called with each episode as it finishes.
        on_torn: called with the bytes of a torn last line that a crash had left, and that was cut off.

    Raises:
        UsageError: there is no task, a task has no gold, or the folder holds a different run.
        InfrastructureFault: a worker died; run again to go on.
    """
    if not evaluation.tasks:
        raise UsageError(f"{evaluation.dataset} has no tasks in split {evaluation.split}")
    for task in evaluation.tasks:
        targets(task.task_id, task.gold, evaluation.config.index.unit)
    stage = evaluation.stage()
    refuse_other_run(stage, out)
    done = finished_keys(out)
    jobs = [job for job in evaluation.jobs() if (job.task.task_id, job.sample_idx) not in _ids(done, stage)]
    on_start(evaluation.samples * len(evaluation.tasks) - len(jobs), evaluation.samples * len(evaluation.tasks))
    with EpisodeStore(out) as store, marked(stage, out):
        on_torn(store.torn)

        def keep(episode: Episode) -> None:
            store.append(episode)
            on_episode(episode)

        run_episodes(evaluation.bench, jobs, keep)
    return write_metrics(evaluation, stage, out)


def write_metrics(evaluation: Evaluation, stage: Stage, out: Path) -> dict[str, Any]:
    """Summarise the run folder into `metrics.json` and close its card."""
    tasks = {task.task_id: task for task in evaluation.tasks}
    metrics = summarise(latest_episodes(out).values(), tasks, evaluation.config, evaluation.seed)
    data = msgspec.json.format(msgspec.json.encode(metrics), indent=2) + b"\n"
    write_atomically(out / METRICS, data)
    gates = {"missing": metrics["missing"], "failures": metrics["failures"]}
    stage.write(out, status="finished", gates=gates)
    return metrics


def _ids(done: set[Any], stage: Stage) -> set[tuple[str, int]]:
    """Finished (task, sample) pairs that belong to this very environment, policy and index."""
    mine = (stage.inputs["env"], stage.inputs["policy"], stage.inputs["index"])
    return {(key.task_id, key.sample_idx) for key in done if (key.env_hash, key.policy_hash, key.index_hash) == mine}
