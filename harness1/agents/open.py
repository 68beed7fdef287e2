"""Open a training run of an agent from the names that a user typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness1.agents.evaluation import open_evaluation
from harness1.agents.process import arguments_of
from harness1.agents.rollouts import Agent, OnPolicyUpstream, agent_rollouts
from harness1.config import Config, Learn
from harness1.data.leaks import open_filter
from harness1.data.open import from_anywhere, open_source
from harness1.episodes.jobs import EpisodeSetup
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.models.fetch import resolve_model
from harness1.models.open import preferred_device
from harness1.models.spec import ModelSpec
from harness1.plugins import identity
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Hashes
from harness1.rl.learning import Learning, OpenRollouts
from harness1.rl.local_rollouts import publish_to
from harness1.rl.open import WEIGHTS
from harness1.rl.task_choice import choose_tasks
from harness1.rl.task_stream import PlacedTask
from harness1.sft.earlier_tasks import tasks_of_runs

if TYPE_CHECKING:
    from harness1.models.adapters import Weights

SESSIONS = "sessions"
"""The record of all calls, below the folder of the training."""


def learning_on_agents(
    config: Config,
    learn: Learn,
    out: Path,
    policy: LanguageModelPolicy,
    command: str,
    evaluation: str,
    environment: Mapping[str, str],
) -> tuple[Learning, OpenRollouts]:
    """Open a training run on the sessions of an agent with the tasks of datasets.

    Args:
        command: see `Agent`.
        evaluation: `MODULE:FUNCTION` or `FILE.py:FUNCTION`.
        environment: the environment variables of the agent.

    Raises:
        UsageError: the evaluation or the tasks cannot be opened, two tasks have one id, or the settings are those of
            episodes in the environment.
    """
    arguments_of(command, {})
    if config.machine.fleet.workers or config.train.watch.metric != "reward":
        raise UsageError("agents have rewards alone: set machine.fleet.workers=0 and train.watch.metric=reward")
    sources = [open_source(data) for data in learn.data]
    taught = {(source.name, learn.split) for source in sources}
    excluded = tasks_of_runs(learn.exclude)
    sieve = open_filter(config.data, sources, taught, share=learn.share, against=learn.against, excluded=excluded)
    tasks, held_out, selections = choose_tasks(sources, learn.split, [None] * len(sources), config, sieve)
    golds = {placed.task.task_id: placed.task.gold for placed in (*tasks, *held_out)}
    if len(golds) < len(tasks) + len(held_out):
        raise UsageError("two tasks of the datasets have the same id: train on one dataset at a time")
    base = resolve_model(ModelSpec.read(learn.model).model)
    known = {"command": command, "evaluate": identity(evaluation)}
    hashes = Hashes(env=digest(known), policy=policy.hash, index="")
    agent = Agent(command, open_evaluation(evaluation), golds, hashes, environment)

    async def publish(state: Weights, version: int) -> None:
        await publish_to(policy.model, state, version, base, out / WEIGHTS)

    upstream = OnPolicyUpstream(learn.model, policy.model, policy.counter, config)
    work = Learning(
        tasks=_public(tasks),
        held_out=_public(held_out),
        setups=[EpisodeSetup(config, "", learn.model)],
        base=base,
        out=out,
        config=config,
        device=config.machine.model.device or preferred_device(),
        datasets=[from_anywhere(data) for data in learn.data],
        split=learn.split,
        selections=selections,
        played_with=known,
    )
    return work, agent_rollouts(agent, upstream, out / SESSIONS, config, publish)


def _public(placed: Sequence[PlacedTask]) -> list[PlacedTask]:
    """Return tasks without their gold: the metrics of our environment say nothing about an agent."""
    return [msgspec.structs.replace(each, task=each.task.public(), setup=0) for each in placed]
