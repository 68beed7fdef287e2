"""harness1 rl train and agents: train a policy on its own episodes, or the model behind any agent."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from harness1.agents.process import arguments_of, find_sandbox
from harness1.agents.sandbox import Sandbox, closed_paths, inherit, needed_paths
from harness1.cli import options
from harness1.cli.options import evaluation_places, place_of, resolve
from harness1.cli.printing import say, say_left_out
from harness1.cli.progress import read_aloud
from harness1.cli.training import TrainingBoard, lead_group, print_checkpoint, refuse_oversized_rl
from harness1.config import Config
from harness1.data.indexing import index_of
from harness1.data.leaks import ShareName
from harness1.data.open import from_anywhere
from harness1.engines.engine import open_service_engine
from harness1.engines.open import open_service
from harness1.errors import UsageError, optional
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.spec import ModelSpec
from harness1.policy.language_model import LanguageModelPolicy
from harness1.rl.rollouts import open_policy_to_train, reserve_devices
from harness1.rl.train import (
    VERB,
    OpenRollouts,
    Training,
    TrainingInputs,
    open_pivot_training,
    open_task_training,
    train_policy,
)
from harness1.training.log import Trackers, clear_training
from harness1.training.process_group import ALONE, ProcessGroup

SHOWN = "reward", "loss", "curated_recall", "set_size", "turns", "entropy", "k3", "gate/mean_k3", "gate/effective_share"
"""The values shown for batches, and for validations."""


def train(
    model: Annotated[str, Option(help="hf:PATH, vllm:PATH or vllm:MODEL@URL.", metavar="SPEC")],
    out: Annotated[Path, Option(help="Folder for the checkpoint.", metavar="CHECKPOINT")],
    data: Annotated[list[str] | None, Option(help="A dataset to learn from; repeatable.", metavar="DATASET")] = None,
    split: Annotated[str, Option(help="The split to take tasks from.")] = "train",
    index: Annotated[list[str] | None, Option(help="An index for each dataset, in order.", metavar="SPEC")] = None,
    admission: Annotated[list[str] | None, Option(help="The `rl check` report of each dataset, in order.")] = None,
    share: options.ShareOf = "",
    against: options.Against = None,
    exclude: options.Exclude = None,
    pivots: Annotated[Path | None, Option(help="Train on turns of a profile, not --data.", metavar="PIVOTS")] = None,
    engine: options.EngineOption = "",
    cache: options.Cache = None,
    tensorboard: options.Tensorboard = False,
    wandb: options.Wandb = "",
    mlflow: options.Mlflow = "",
    ends_at: options.EndsAt = math.inf,
    tools: options.Tools = None,
    rewards: options.Rewards = None,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train a policy on its own episodes; a stopped training run resumes from its last saved state.

    On several GPUs: torchrun --nproc-per-node 8 -m harness1 rl train ...

    Example: harness1 rl train --config rl/small --data world:1000 --model hf:student --out better"""
    with lead_group() as group:
        if group is None:
            return
        settings = resolve(config, overrides, model, tools=tools, rewards=rewards)
        if bool(data) == (pivots is not None):
            raise UsageError("give either --data or --pivots")
        service = None
        if engine:
            service = open_service(engine, resolve_model(ModelSpec.read(model).model), settings, group.size)
        else:
            refuse_oversized_rl(settings, model, group.size)
        policy = open_policy_to_train(model, settings, service and service.sampler)
        inputs = _inputs(settings, data or (), model, split, share, against, exclude, index or (), admission or ())
        if pivots is None:
            find_index = partial(index_of, cache=cache, config=settings, read=read_aloud, say=say)
            work, players = open_task_training(settings, inputs, out, policy, find_index)
        else:
            work, players = open_pivot_training(settings, inputs, out, policy, pivots)
        alone = reserve_devices(policy.model, settings, work.device, group.size)
        logs = Trackers(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow)
        trainer = partial(open_service_engine, service, settings) if service is not None else work.open_engine
        work = replace(work, trackers=logs, undisturbed=alone, ends_at=ends_at, open_engine=trainer)
        _carry_out(work, players, policy, group, force, as_json)


def _inputs(
    settings: Config,
    data: Sequence[str],
    model: str,
    split: str,
    share: ShareName,
    against: Sequence[str] | None,
    exclude: Sequence[Path] | None,
    index: Sequence[str] = (),
    admission: Sequence[str] = (),
) -> TrainingInputs:
    return TrainingInputs(
        data=tuple(place_of(each, settings) for each in data),
        model=model,
        split=split,
        index=tuple(index),
        admission=tuple(admission),
        share=share,
        against=evaluation_places(against, settings),
        exclude=tuple(map(str, exclude or ())),
    )


def train_aloud(work: Training, players: OpenRollouts, policy: LanguageModelPolicy, group: ProcessGroup) -> Checkpoint:
    """Train, and show the progress; raise as `train_policy`."""
    with TrainingBoard(work.out.name, "batch", SHOWN) as board:
        return train_policy(work, players, policy.counter, policy.hash, board.listen, group)


def _carry_out(
    work: Training, players: OpenRollouts, policy: LanguageModelPolicy, group: ProcessGroup, force: bool, as_json: bool
) -> None:
    say_left_out(*work.selections)
    if force:
        work.check()  # nothing is deleted if the training is refused
        clear_training(work.out, VERB)
    done = read_checkpoint(work.out) if work.is_done(policy.hash) else None
    print_checkpoint(done or train_aloud(work, players, policy, group), work.out, "batch", as_json)


def agents(
    command: Annotated[str, Option(help="The agent's command with {query}, {task_id}, {base_url}.", metavar="COMMAND")],
    data: Annotated[list[str], Option(help="A dataset of tasks, by name or path; repeatable.", metavar="DATASET")],
    upstream: Annotated[str, Option(help="hf:PATH, vllm:PATH or vllm:MODEL@URL.", metavar="SPEC")],
    evaluate: Annotated[str, Option(help="What scores a session: MODULE:NAME or FILE.py:NAME.", metavar="FUNCTION")],
    out: Annotated[Path, Option(help="Folder for the checkpoint.", metavar="CHECKPOINT")],
    env: Annotated[list[str] | None, Option(help="A variable that agents inherit; repeatable.", metavar="NAME")] = None,
    sandbox: Annotated[bool, Option(help="Keep agents apart; without it, the command must.")] = True,
    split: Annotated[str, Option(help="The split to take tasks from.")] = "train",
    share: options.ShareOf = "",
    against: options.Against = None,
    exclude: options.Exclude = None,
    tensorboard: options.Tensorboard = False,
    wandb: options.Wandb = "",
    mlflow: options.Mlflow = "",
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train the model behind an agent of any kind: a command for each task, its calls recorded, its work scored.

    The agent finds the model through OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY,
    and its task in task.json in its working folder. It is played machine.concurrency times at once, each for
    machine.episode_deadline_s at most, apart from the others as far as this machine permits.

    Example: harness1 rl agents --command "python agent.py" --data world:1000 --upstream hf:student \\
        --evaluate harness1.agents.evaluation:delivered_f1 --config rl/small --out better"""
    with optional("serve"):  # not above: the help of this verb needs no extra
        from harness1.agents.training import open_agent_training

    inherited = inherit(os.environ, env or ())
    settings = resolve(config, overrides, upstream)
    refuse_oversized_rl(settings, upstream, 1)
    policy = open_policy_to_train(upstream, settings)
    inputs = _inputs(settings, data, upstream, split, share, against, exclude)
    kept = Sandbox(limited=False)
    if sandbox:
        needed = needed_paths(arguments_of(command, {}), inherited)
        closed = closed_paths(out, map(from_anywhere, inputs.data), evaluate, Path.home(), needed)
        kept = asyncio.run(find_sandbox(closed, needed))
    work, players = open_agent_training(settings, inputs, out, policy, command, evaluate, inherited, kept)
    say(kept.describe())
    alone = reserve_devices(policy.model, settings, work.device, 1)
    work = replace(work, trackers=Trackers(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow), undisturbed=alone)
    with interrupt_by_sigterm():
        _carry_out(work, players, policy, ALONE, force, as_json)


@contextmanager
def interrupt_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end what is within, once, as Ctrl-C does, also where that is ignored: behind a script."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
