"""harness1 rl train: a policy learns from its own episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from harness1.cli.checkpoint import print_checkpoint
from harness1.cli.dashboard import dashboard_of_training
from harness1.cli.evaluate import index_of
from harness1.cli.options import ConfigFile, Force, Json, Overrides, resolve
from harness1.config import Config, Learn
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.env.environment import env_hash
from harness1.episodes.jobs import EpisodeSetup
from harness1.errors import UsageError
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.models.open import ModelSpec, preferred_device
from harness1.policy.language_model import LanguageModelPolicy
from harness1.retrieval.open import absolute_index, open_retriever
from harness1.rl import learning
from harness1.rl.admission.report import admitted_tasks, read_report
from harness1.rl.learning import Learning, OpenRollouts
from harness1.rl.local_rollouts import LocalRollouts, base_folder, open_policy_to_train, open_rollouts, publish_to
from harness1.rl.pivots.profile import open_training
from harness1.rl.ray_rollouts import RayRollouts
from harness1.rl.task_choice import choose_tasks
from harness1.rl.task_stream import PlacedTask

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "weights"
"""Where versions of the weights are written, for servers that load them by path."""
SHOWN = ("reward", "loss", "curated_recall", "set_size", "turns", "entropy", "k3")
"""What is said of batches, and of looks."""


def train(
    data: Annotated[
        list[str] | None, typer.Option("--data", help="What to learn from; may be given again.", metavar="DATASET")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="hf:PATH, vllm:PATH, vllm:MODEL@URL or sglang:MODEL@URL.", metavar="SPEC")
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Where the checkpoint goes.", metavar="CHECKPOINT")] = None,
    split: Annotated[str, typer.Option("--split", help="Which tasks; default train.")] = "",
    index: Annotated[
        list[str] | None, typer.Option("--index", help="An index for each dataset, in their order.", metavar="SPEC")
    ] = None,
    admission: Annotated[
        list[str] | None,
        typer.Option("--admission", help="A report of `rl check` for each dataset: its admitted tasks alone."),
    ] = None,
    pivots: Annotated[
        Path | None,
        typer.Option("--pivots", help="Train on the single turns of a profile instead of --data.", metavar="PIVOTS"),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where indexes are kept; default ~/.cache/harness1.", metavar="DIR")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files for TensorBoard too.")] = False,
    wandb: Annotated[str, typer.Option("--wandb", help="A project of Weights & Biases.", metavar="PROJECT")] = "",
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Let a policy learn from its own episodes; a stopped training goes on from its last saved state.

    Example: harness1 rl train --config configs/rl/small.toml --data world:1000 --model hf:student --out better
    """
    settings = resolve(config, overrides)
    given = {"data": data, "index": index, "admission": admission}
    learn = _with(settings.machine.learn, {name: tuple(value) for name, value in given.items() if value})
    learn = _with(learn, {name: value for name, value in (("model", model), ("split", split)) if value})
    if pivots is not None and data:
        raise UsageError("give --data or --pivots, not both")
    if not ((pivots or learn.data) and learn.model and (out or learn.out)):
        raise UsageError("give --data, --model and --out, or machine.learn.data, model and out in the configuration")
    out = out or Path(learn.out)
    policy = open_policy_to_train(learn.model, settings)
    work, players = (
        _on_tasks(settings, learn, out, cache, policy)
        if pivots is None
        else _on_pivots(settings, learn, out, pivots, policy)
    )
    work = replace(work, tensorboard=tensorboard, wandb=wandb)
    if force:
        work.check()  # nothing is cleared for a training that cannot be
        learning.clear_learning(work.out)
    done = read_checkpoint(work.out) if work.is_done(policy.hash) else None
    print_checkpoint(done or _trained(work, players, policy), work.out, "batch", as_json)


def _trained(work: Learning, players: OpenRollouts, policy: LanguageModelPolicy) -> Checkpoint:
    with dashboard_of_training(f"rl {work.out.name}") as board:
        return learning.learn(work, players, policy.counter, policy.hash, board.listener("batch", SHOWN))


def _with(learn: Learn, given: Mapping[str, object]) -> Learn:
    return msgspec.structs.replace(learn, **given)


def _on_tasks(
    config: Config, learn: Learn, out: Path, cache: Path | None, policy: LanguageModelPolicy
) -> tuple[Learning, OpenRollouts]:
    """Whole episodes on the tasks of datasets."""
    sources = [open_source(data) for data in learn.data]
    for name in ("index", "admission"):
        if (count := len(getattr(learn, name))) not in (0, len(sources)):
            raise UsageError(f"{count} of --{name} for {len(sources)} of --data: give one for each, or none")
    admitted = [
        _admitted(Path(report), source, config) for report, source in zip(learn.admission, sources, strict=False)
    ]
    choice = choose_tasks(sources, learn.split, admitted or [None] * len(sources), config)
    indexes = [
        index_of(source, named, cache, config)
        for source, named in zip(sources, learn.index or [None] * len(sources), strict=True)
    ]
    setups = [EpisodeSetup(config, found, learn.model) for found in indexes]
    base = base_folder(learn.model)
    hashes = [open_retriever(found, config).info.index_hash for found in indexes]
    work = Learning(*choice, setups, base, out, config, _device(config), index_hashes=hashes)
    return work, _players(setups, learn.model, base, out / WEIGHTS, policy)


def _admitted(path: Path, source: Source, config: Config) -> frozenset[str]:
    """The tasks that a report admits, if it is about this dataset and reward."""
    report = read_report(path)
    of = {"dataset": open_source(report.dataset).name, "reward": report.reward_hash, "environment": report.env_hash}
    ours = {"dataset": source.name, "reward": config.reward_hash, "environment": env_hash(config.env)}
    if others := [name for name, known in ours.items() if of[name] != known]:
        raise UsageError(
            f"{path} is a report on another {' and another '.join(others)}: run harness1 rl check with the --config of"
            " the training"
        )
    return admitted_tasks(path, config.rl.headroom)


def _players(
    setups: Sequence[EpisodeSetup], spec: str, base: Path, versions: Path, policy: LanguageModelPolicy
) -> OpenRollouts:
    """Who plays: this process, or workers on a cluster, each with a policy of its own."""
    fleet = setups[0].config.machine.fleet
    if fleet.workers:
        if ModelSpec.read(spec).url is not None:
            raise UsageError("workers of a fleet each have a model of their own: hf:PATH or vllm:PATH, and no server")
        # Workers have another current directory.
        whole = f"{ModelSpec.read(spec).kind}:{base.resolve()}"
        found = [replace(each, retriever=absolute_index(each.retriever), policy=whole) for each in setups]
        return RayRollouts(partial(open_rollouts, found, whole, base.resolve(), versions.resolve()), fleet)
    return nullcontext(LocalRollouts(setups, policy, base, versions))


def _on_pivots(
    config: Config, learn: Learn, out: Path, pivots: Path, policy: LanguageModelPolicy
) -> tuple[Learning, OpenRollouts]:
    """Single turns of a teacher."""
    if config.rl.anchors or config.machine.fleet.workers or learn.admission:
        raise UsageError(
            "--pivots trains on single turns here: without rl.anchors, machine.fleet.workers and --admission"
        )
    if config.train.watch.metric != "reward":
        raise UsageError("single turns have no recall of their own: set train.watch.metric=reward")
    base = base_folder(learn.model)

    async def publish(state: Mapping[str, Tensor], version: int) -> None:
        await publish_to(policy.model, state, version, base, out / WEIGHTS)

    index = learn.index[0] if learn.index else ""
    training = open_training(pivots, policy, config, publish, index)
    tasks, held_out = (list(map(PlacedTask, each)) for each in (training.train, training.held_out))
    setups = [EpisodeSetup(config, index, learn.model)]
    validation = held_out[: config.train.watch.tasks]
    return Learning(tasks, validation, setups, base, out, config, _device(config)), nullcontext(training.rollouts)


def _device(config: Config) -> str:
    return config.machine.model.device or preferred_device()
