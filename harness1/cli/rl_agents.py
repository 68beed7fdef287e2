"""harness1 rl agents: train the model behind any agent."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Option

from harness1.cli.dashboard import TrainingBoard
from harness1.cli.datasets import evaluation_places, place_of
from harness1.cli.interrupt import interrupted_by_sigterm
from harness1.cli.memory import refuse_oversized_rl
from harness1.cli.options import (
    Against,
    ConfigFile,
    Exclude,
    Force,
    Json,
    Mlflow,
    Overrides,
    ShareOf,
    Tensorboard,
    Wandb,
    resolve,
)
from harness1.cli.printing import say_left_out
from harness1.cli.results import print_checkpoint
from harness1.errors import optional
from harness1.models.checkpoint import read_checkpoint
from harness1.rl.rollouts import open_policy_to_train, undisturbed
from harness1.rl.train import VERB, train_policy
from harness1.training.log import Trackers, clear_training
from harness1.training.process_group import ALONE

SHOWN = ("reward", "loss", "turns", "entropy", "k3", "gate/mean_k3", "gate/effective_share")


def agents(
    command: Annotated[
        str, Option(help="The agent's command; {query}, {task_id} and {base_url} are filled in.", metavar="COMMAND")
    ],
    data: Annotated[list[str], Option(help="A dataset of tasks, by name or path; may be repeated.", metavar="DATASET")],
    upstream: Annotated[str, Option(help="hf:PATH, vllm:PATH, vllm:MODEL@URL or sglang:MODEL@URL.", metavar="SPEC")],
    evaluate: Annotated[
        str, Option(help="What scores a session: MODULE:FUNCTION or FILE.py:FUNCTION.", metavar="FUNCTION")
    ],
    out: Annotated[Path, Option(help="Folder for the checkpoint.", metavar="CHECKPOINT")],
    split: Annotated[str, Option(help="The split to take tasks from.")] = "train",
    share: ShareOf = "",
    against: Against = None,
    exclude: Exclude = None,
    tensorboard: Tensorboard = False,
    wandb: Wandb = "",
    mlflow: Mlflow = "",
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train the model behind an agent of any kind: a command for each task, its calls recorded, its work scored.

    The agent finds the model through OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY,
    and its task in task.json in its working folder. It is played machine.concurrency times at once, each for
    machine.episode_deadline_s at most.

    Example: harness1 rl agents --command "python agent.py" --data world:1000 --upstream hf:student \\
        --evaluate harness1.agents.evaluation:delivered_f1 --config rl/small --out better
    """
    with optional("serve"):  # not above: the help of this verb needs no extra
        from harness1.agents.training import open_agent_training

    settings = resolve(config, overrides, upstream)
    refuse_oversized_rl(settings, upstream, 1)
    policy = open_policy_to_train(upstream, settings)
    inputs = msgspec.structs.replace(
        settings.machine.learn,
        data=tuple(place_of(each, settings) for each in data),
        split=split,
        share=share or "",
        against=evaluation_places(against, settings),
        exclude=tuple(str(each) for each in exclude or ()),
        model=upstream,
    )
    work, players = open_agent_training(settings, inputs, out, policy, command, evaluate, os.environ)
    alone = undisturbed(policy.model, settings, work.device, 1)
    work = replace(work, trackers=Trackers(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow), undisturbed=alone)
    say_left_out(*work.selections)
    if force:
        work.check()  # nothing is deleted if the training is refused
        clear_training(out, VERB)
    done = read_checkpoint(out) if work.is_done(policy.hash) else None
    if done is None:
        with interrupted_by_sigterm(), TrainingBoard(out.name, "batch", SHOWN) as board:
            done = train_policy(work, players, policy.counter, policy.hash, board.listen, ALONE)
    print_checkpoint(done, out, "batch", as_json)
