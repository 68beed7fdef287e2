"""Open a training run from the names that a user typed: its tasks and its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import Config, Learn
from harness1.data.leaks import open_filter
from harness1.data.open import from_anywhere, open_source
from harness1.data.source import Source
from harness1.env.environment import env_hash
from harness1.episodes.jobs import EpisodeSetup, refuse_session_names
from harness1.errors import UsageError
from harness1.models.fetch import resolve_model
from harness1.models.open import preferred_device
from harness1.models.spec import ModelSpec
from harness1.policy.language_model import LanguageModelPolicy
from harness1.retrieval.open import absolute_index, open_retriever
from harness1.rl.admission.report import read_report
from harness1.rl.learning import Learning, OpenRollouts
from harness1.rl.local_rollouts import LocalRollouts, open_rollouts, publish_to
from harness1.rl.pivots.profile import LeaveOut
from harness1.rl.pivots.training import open_training
from harness1.rl.ray_rollouts import RayRollouts
from harness1.rl.task_choice import TaskChoice, choose_tasks
from harness1.rl.task_stream import PlacedTask
from harness1.sft.earlier_tasks import tasks_of_runs

if TYPE_CHECKING:
    from harness1.models.adapters import Weights

WEIGHTS = "weights"
"""The folder of versions of the weights, for servers that load them by path."""
FindIndex = Callable[[Source, str | None], str]
"""Returns the index of a source, which may be one that the user names (see `data.indexing.index_of`)."""


def learning_on_tasks(
    config: Config, learn: Learn, out: Path, policy: LanguageModelPolicy, find_index: FindIndex
) -> tuple[Learning, OpenRollouts]:
    """Open a training run on whole episodes of the tasks of datasets.

    Raises:
        UsageError: as `open_tasks`, or workers cannot have the model.
    """
    (tasks, held_out, selections), setups = open_tasks(config, learn, find_index)
    base = resolve_model(ModelSpec.read(learn.model).model)
    hashes = [open_retriever(setup.retriever, config).info.index_hash for setup in setups]
    work = Learning(tasks, held_out, setups, base, out, config, _device(config), index_hashes=hashes)
    datasets = [from_anywhere(data) for data in learn.data]
    work = replace(work, datasets=datasets, split=learn.split, selections=selections)
    return work, _players(setups, learn.model, base, out / WEIGHTS, policy)


def open_tasks(config: Config, learn: Learn, find_index: FindIndex) -> tuple[TaskChoice, list[EpisodeSetup]]:
    """Return the tasks of datasets that may be learned from, the validation tasks, and the setup of each dataset.

    Raises:
        UsageError: the numbers of indexes, reports and datasets differ, a report is on another dataset,
            reward or environment, or the tasks do not fit (`choose_tasks`).
    """
    sources = [open_source(data) for data in learn.data]
    for name in ("index", "admission"):
        if (count := len(getattr(learn, name))) not in (0, len(sources)):
            raise UsageError(f"{count} of --{name} for {len(sources)} of --data: give one for each, or none")
    admitted = [_admitted(Path(path), source, config) for path, source in zip(learn.admission, sources, strict=False)]
    excluded = tasks_of_runs(learn.exclude)
    taught = {(source.name, learn.split) for source in sources}
    sieve = open_filter(config.data, sources, taught, share=learn.share, against=learn.against, excluded=excluded)
    choice = choose_tasks(sources, learn.split, admitted or [None] * len(sources), config, sieve)
    named = learn.index or [None] * len(sources)
    indexes = [find_index(source, index) for source, index in zip(sources, named, strict=True)]
    return choice, [EpisodeSetup(config, index, learn.model) for index in indexes]


def learning_on_pivots(
    config: Config, learn: Learn, out: Path, policy: LanguageModelPolicy, pivots: Path
) -> tuple[Learning, OpenRollouts]:
    """Open a training run on the single turns of a teacher that a profile kept.

    Raises:
        UsageError: the settings are those of whole episodes, or the profile cannot be opened.
        ConfigError: the profile was made with another policy or configuration.
    """
    if config.machine.fleet.workers or learn.admission:
        raise UsageError("--pivots trains on single turns here: without machine.fleet.workers and --admission")
    if learn.share:
        raise UsageError("--share divides the tasks of --data: collect the teacher's episodes over one share instead")
    if config.train.watch.metric != "reward":
        raise UsageError("single turns have no recall of their own: set train.watch.metric=reward")
    base = resolve_model(ModelSpec.read(learn.model).model)

    async def publish(state: Weights, version: int) -> None:
        await publish_to(policy.model, state, version, base, out / WEIGHTS)

    index = learn.index[0] if learn.index else ""
    leave_out = LeaveOut(learn.against, tasks_of_runs(learn.exclude))
    training = open_training(pivots, policy, config, publish, index, leave_out=leave_out)
    tasks, held_out = (list(map(PlacedTask, each)) for each in (training.train, training.held_out))
    setups = [EpisodeSetup(config, index, learn.model)]
    validation = held_out[: config.train.watch.tasks]
    work = Learning(tasks, validation, setups, base, out, config, _device(config), selections=[training.selection])
    return work, nullcontext(training.rollouts)


def _admitted(path: Path, source: Source, config: Config) -> frozenset[str]:
    """Return the tasks that a report admits, if it is about this dataset, reward and environment."""
    report = read_report(path)
    of = {"dataset": open_source(report.dataset).name, "reward": report.reward_hash, "environment": report.env_hash}
    ours = {"dataset": source.name, "reward": config.reward_hash, "environment": env_hash(config.env)}
    if others := [name for name, known in ours.items() if of[name] != known]:
        raise UsageError(
            f"{path} is a report on another {' and another '.join(others)}: run harness1 rl check with the --config of"
            " the training"
        )
    return frozenset(report.admitted(config.rl.headroom))


def _players(
    setups: Sequence[EpisodeSetup], spec: str, base: Path, versions: Path, policy: LanguageModelPolicy
) -> OpenRollouts:
    """Return the rollouts: in this process, or in workers on a cluster, each with its own policy."""
    fleet = setups[0].config.machine.fleet
    if fleet.workers:
        if ModelSpec.read(spec).url is not None:
            raise UsageError("each worker of a fleet has its own model: give hf:PATH or vllm:PATH, not a server")
        for setup in setups:
            refuse_session_names(setup)
        # Workers run in a different directory.
        whole = f"{ModelSpec.read(spec).kind}:{base.resolve()}"
        found = [replace(each, retriever=absolute_index(each.retriever), policy=whole) for each in setups]
        return RayRollouts(partial(open_rollouts, found, whole, base.resolve(), versions.resolve()), fleet)
    return nullcontext(LocalRollouts(setups, policy, base, versions))


def _device(config: Config) -> str:
    return config.machine.model.device or preferred_device()
