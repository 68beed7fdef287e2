"""Choose the tasks of a training run and those of its validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from harness1.config import Config
from harness1.data.leaks import Selection, ShareName, TaskFilter, open_filter
from harness1.data.open import from_anywhere, open_source
from harness1.data.source import Source
from harness1.env.environment import env_hash
from harness1.episodes.jobs import EpisodeSetup, refuse_session_names
from harness1.errors import UsageError
from harness1.models.fetch import resolve_model
from harness1.models.open import choose_device
from harness1.models.spec import ModelSpec
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Record, Task
from harness1.retrieval.open import absolute_index, open_retriever
from harness1.reward.measures import targets
from harness1.rl.admission import HEADROOM, read_report
from harness1.rl.groups import PlacedTask
from harness1.rl.pivots import open_training
from harness1.rl.ray_rollouts import RayRollouts
from harness1.rl.rollouts import LocalRollouts, open_rollouts, publish_to
from harness1.rl.train import OpenRollouts, Training
from harness1.sft.collect import check_taught_split, take_in_turn, tasks_of_runs

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


DEV = "dev"  # the split for validation, if a dataset has it


class TrainingInputs(Record):
    """What a training run learns from, and what it begins with."""

    data: tuple[str, ...] = ()
    """Datasets. Those with a `dev` split are validated on it; some tasks of the others are held out."""
    model: str = ""  # the starting weights: hf:PATH, or vllm:MODEL@URL with the same weights on this machine
    split: str = "train"  # the split of each dataset that tasks are taken from
    index: tuple[str, ...] = ()  # an existing index for each dataset; empty: build one for each
    admission: tuple[str, ...] = ()
    """A report of `rl check` for each dataset; only its admitted tasks are sampled. Empty: all tasks."""
    share: ShareName = ""
    """Learn only from the tasks that `data.sft_share` gives to fine-tuning, or only from the others; empty: all."""
    against: tuple[str, ...] = ()
    """Evaluation sets beside `dev` and `test` of the datasets, as DATASET or DATASET:SPLIT; see `data.leaks`."""
    exclude: tuple[str, ...] = ()  # folders of runs, SFT datasets or checkpoints, whose tasks are not learned from


class TaskChoice(NamedTuple):
    """The tasks to learn from, the validation tasks (no task is in both), and an account for each dataset."""

    tasks: list[PlacedTask]
    held_out: list[PlacedTask]
    selections: list[Selection]


def choose_tasks(
    sources: Sequence[Source],
    split: str,
    admitted: Sequence[frozenset[str] | None],
    config: Config,
    sieve: TaskFilter | None = None,
) -> TaskChoice:
    """Choose the tasks of a split of each dataset that may be learned from (of those `admitted`, None for all), and
    `train.watch.tasks` validation tasks, from each dataset in turn: from its split `dev`, or drawn from the tasks by
    `rl.seed` if there is no `dev` or it is the split to learn from. Unless `data.leaks` is "keep", what is learned
    gives away no validation task, and neither gives away a test task: the sieve, by default that of `open_filter`,
    leaves them out. Raise UsageError if the split is missing, reserved for testing, or has no task left to learn from;
    or a task lacks its gold."""
    for source in sources:
        check_taught_split(split, source.name)
    sieve = sieve or open_filter(config.data, sources, {(source.name, split) for source in sources})
    choice = TaskChoice([], [], [])
    validation: list[list[PlacedTask]] = []
    for setup, (source, ids) in enumerate(zip(sources, admitted, strict=True)):
        tasks, held_out, account = _choose(source, split, ids, len(sources), config, sieve)
        for task in (*tasks, *held_out):
            targets(task.task_id, task.gold, config.index.unit)
        choice.tasks.extend(PlacedTask(task, setup) for task in tasks)
        choice.selections.append(account)
        validation.append([PlacedTask(task, setup) for task in held_out])
    return choice._replace(held_out=take_in_turn(validation, config.train.watch.tasks))


def _choose(
    source: Source, split: str, admitted: frozenset[str] | None, datasets: int, config: Config, sieve: TaskFilter
) -> tuple[list[Task], list[Task], Selection]:
    wanted, drawn = config.train.watch.tasks, tuple[str, ...]()
    tasks, account = sieve.select(source.name, split, source.tasks(split))
    if DEV in source.splits and split != DEV:
        held_out = sieve.validation(source.name, DEV, source.tasks(DEV))[:wanted]
        apart = tasks
    else:
        share = min(wanted // datasets + 1 if wanted else 0, len(tasks) // 2)
        places = set(Random(f"{config.rl.seed}/held out").sample(range(len(tasks)), share))
        held_out = [task for at, task in enumerate(tasks) if at in places]
        drawn = tuple(task.task_id for task in held_out)
        apart = sieve.beside(held_out, source.name, [task for at, task in enumerate(tasks) if at not in places])
    left = [task for task in apart if admitted is None or task.task_id in admitted]
    account = msgspec.structs.replace(
        account,
        held_out=drawn,
        beside=len(tasks) - len(drawn) - len(apart),
        rejected=len(apart) - len(left),
        learned=tuple(task.task_id for task in left),
    )
    if not left:
        raise UsageError(account.line or f"{source.name} has no tasks in split {split}")
    return left, held_out, account


WEIGHTS = "weights"  # the folder of versions of the weights, for servers that load them by path
FindIndex = Callable[[Source, str | None], str]  # returns the index of a source, which may be one that the user names


def open_task_training(
    config: Config, inputs: TrainingInputs, out: Path, policy: LanguageModelPolicy, find_index: FindIndex
) -> tuple[Training, OpenRollouts]:
    """Open a training run on whole episodes of the tasks of datasets; raise UsageError as `open_tasks`, or workers
    cannot have the model."""
    (tasks, held_out, selections), setups = open_tasks(config, inputs, find_index)
    base = resolve_model(ModelSpec.read(inputs.model).model)
    work = Training(
        *(tasks, held_out, setups, base, out, config, _device(config)),
        index_hashes=[open_retriever(setup.retriever, config).info.index_hash for setup in setups],
        datasets=[from_anywhere(data) for data in inputs.data],
        split=inputs.split,
        selections=selections,
    )
    return work, _players(setups, inputs.model, base, out / WEIGHTS, policy)


def open_tasks(config: Config, inputs: TrainingInputs, find_index: FindIndex) -> tuple[TaskChoice, list[EpisodeSetup]]:
    """Return the tasks of datasets that may be learned from, the validation tasks, and the setup of each dataset; raise
    UsageError if the numbers of indexes, reports and datasets differ, a report is on another dataset, reward or
    environment, or the tasks do not fit (`choose_tasks`)."""
    sources = [open_source(data) for data in inputs.data]
    for name in ("index", "admission"):
        if (count := len(getattr(inputs, name))) not in (0, len(sources)):
            raise UsageError(f"{count} of --{name} for {len(sources)} of --data: give one for each, or none")
    admitted = [
        _read_admitted(Path(path), source, config) for path, source in zip(inputs.admission, sources, strict=False)
    ]
    excluded = tasks_of_runs(inputs.exclude)
    taught = {(source.name, inputs.split) for source in sources}
    sieve = open_filter(config.data, sources, taught, share=inputs.share, against=inputs.against, excluded=excluded)
    choice = choose_tasks(sources, inputs.split, admitted or [None] * len(sources), config, sieve)
    named = inputs.index or [None] * len(sources)
    indexes = [find_index(source, index) for source, index in zip(sources, named, strict=True)]
    return choice, [EpisodeSetup(config, index, inputs.model) for index in indexes]


def open_pivot_training(
    config: Config, inputs: TrainingInputs, out: Path, policy: LanguageModelPolicy, pivots: Path
) -> tuple[Training, OpenRollouts]:
    """Open a training run on the single turns of a teacher that a profile kept; raise UsageError if the settings are
    those of whole episodes, or the profile cannot be opened; ConfigError if the profile was made with another policy
    or configuration."""
    if config.machine.fleet.workers or inputs.admission:
        raise UsageError("--pivots trains on single turns here: without machine.fleet.workers and --admission")
    if inputs.share:
        raise UsageError("--share divides the tasks of --data: collect the teacher's episodes over one share instead")
    if config.train.watch.metric != "reward":
        raise UsageError("single turns have no recall of their own: set train.watch.metric=reward")
    base = resolve_model(ModelSpec.read(inputs.model).model)

    async def publish(state: Weights, version: int) -> None:
        await publish_to(policy.model, state, version, base, out / WEIGHTS)

    index = inputs.index[0] if inputs.index else ""
    training = open_training(pivots, policy, config, publish, index, inputs.against, tasks_of_runs(inputs.exclude))
    tasks, held_out = (list(map(PlacedTask, each)) for each in (training.train, training.held_out))
    setups = [EpisodeSetup(config, index, inputs.model)]
    validation = held_out[: config.train.watch.tasks]
    work = Training(tasks, validation, setups, base, out, config, _device(config), selections=[training.selection])
    return work, nullcontext(training.rollouts)


def _read_admitted(path: Path, source: Source, config: Config) -> frozenset[str]:
    """Return the tasks that a report admits, if it is about this dataset, reward and environment."""
    report = read_report(path)
    of = {"dataset": open_source(report.dataset).name, "reward": report.reward_hash, "environment": report.env_hash}
    ours = {"dataset": source.name, "reward": config.reward_hash, "environment": env_hash(config.env)}
    if others := [name for name, known in ours.items() if of[name] != known]:
        raise UsageError(
            f"{path} is a report on another {' and another '.join(others)}: run harness1 rl check with the --config of"
            " the training"
        )
    return frozenset(report.list_admitted(HEADROOM))


def _players(
    setups: Sequence[EpisodeSetup], spec: str, base: Path, versions: Path, policy: LanguageModelPolicy
) -> OpenRollouts:
    """Return the rollouts: in this process, or in workers on a cluster, each with its own policy."""
    machine = setups[0].config.machine
    fleet = machine.fleet
    if fleet.workers:
        if ModelSpec.read(spec).url is not None:
            raise UsageError("each worker of a fleet has its own model: give hf:PATH or vllm:PATH, not a server")
        for setup in setups:
            refuse_session_names(setup)
        # Workers run in a different directory.
        whole = f"{ModelSpec.read(spec).kind}:{base.resolve()}"
        found = [replace(each, retriever=absolute_index(each.retriever), policy=whole) for each in setups]
        return RayRollouts(
            partial(open_rollouts, found, whole, base.resolve(), versions.resolve()), fleet, machine.concurrency
        )
    return nullcontext(LocalRollouts(setups, policy, base, versions))


def _device(config: Config) -> str:
    return config.machine.device or choose_device()
