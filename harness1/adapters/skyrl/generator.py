"""A generator for SkyRL's trainer: it plays the episodes that the trainer asks for, with the trainer's own engines.

The class meets `skyrl/train/generators/base.py` (SkyRL 0.4.0) without importing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from uuid import uuid4

import msgspec

from harness1.adapters.skyrl.backend import InferenceClient, SkyRLBackend
from harness1.adapters.skyrl.export import unfit
from harness1.adapters.skyrl.generator_output import (
    GeneratorOutput,
    TrajectoryId,
    generator_output,
    instance_of,
    trajectory_of,
)
from harness1.config import ChatPolicy
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.models.formats.chat_format import ChatFormat
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode
from harness1.reward.composite import score
from harness1.rl.task_stream import PlacedTask

TASK = "task"
"""The key of `env_extras` under which SkyRL hands the position of a task back."""
EVALUATION = "eval"


class HarnessGenerator:
    """Plays trajectories with `rollout` and scores them; groups are compared by SkyRL.

    Args:
        tasks: indexed by `env_extras["task"]`.
        setups: indexed by `PlacedTask.setup`; all have the same configuration.
        name, model: as in `SkyRLBackend`.
    """

    def __init__(
        self,
        tasks: Sequence[PlacedTask],
        setups: Sequence[EpisodeSetup],
        chat: ChatFormat,
        client: InferenceClient,
        name: str,
        model: str | None = None,
    ) -> None:
        self._tasks, self._setups, self._chat = tasks, setups, chat
        self._client, self._name, self._model = client, name, model
        self._config = setups[0].config
        self._places = asyncio.Semaphore(self._config.machine.concurrency)

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Play one episode for each entry of `trajectory_ids` and return SkyRL's `GeneratorOutput`.

        Raises:
            UsageError: the batch names no tasks, or samples in another way than a trainer can correct for.
        """
        names, extras = input_batch.get("trajectory_ids"), input_batch.get("env_extras")
        if not names or not extras or not all(TASK in each for each in extras):
            raise UsageError("SkyRL gave no trajectory_ids, or env_extras without a task: use TaskDataset")
        asked, told = input_batch.get("sampling_params") or {}, input_batch.get("batch_metadata")
        validates = told is not None and told.training_phase == EVALUATION
        settings = self._sampling(asked, validates)
        step = 0 if told is None else told.global_step
        episodes = await _together(
            self._play(name, self._tasks[each[TASK]], settings, step) for name, each in zip(names, extras, strict=True)
        )
        groups = [list(each) for _, each in groupby(episodes, instance_of)]
        broken = _is_unscored if validates else _is_unfit
        return _as_skyrl(generator_output(groups, broken, compared=not validates), names, episodes)

    def _sampling(self, asked: Mapping[str, Any], validates: bool) -> ChatPolicy:
        """Return the settings of the policy with SkyRL's temperature.

        Raises:
            UsageError: a training would not sample from the policy itself.
        """
        settings = msgspec.structs.replace(self._config.policy, temperature=float(asked.get("temperature", 1.0)))
        changed = settings.temperature != 1.0 and not validates
        if changed or asked.get("top_p", 1.0) != 1.0 or asked.get("top_k", -1) not in (-1, 0):
            raise UsageError("SkyRL's generator.sampling_params must be temperature=1, top_p=1 and top_k=-1")
        return msgspec.structs.replace(settings, top_p=1.0, top_k=0, constrained=False)

    async def _play(self, name: Any, placed: PlacedTask, settings: ChatPolicy, step: int) -> Episode:
        """Play one episode and score it."""
        instance, sample = str(name.instance_id), int(name.repetition_id)
        config, setup = self._config, self._setups[placed.setup]
        backend = SkyRLBackend(self._client, self._name, self._model, uuid4().hex)
        policy = LanguageModelPolicy(backend, self._chat, config.env.generation_reserve, settings, "skyrl")
        seed = int(digest([config.rl.seed, step, instance, sample])[:8], 16) >> 1
        async with self._places:
            env = setup.environment(setup.open_retriever(), policy)
            try:
                episode = await rollout(env, policy, placed.task, seed=seed, sample_idx=sample, group_id=instance)
            finally:
                await backend.close()
        return score(episode, placed.task.gold, config)


async def _together(plays: Iterable[Coroutine[Any, Any, Episode]]) -> list[Episode]:
    """Return the episodes in order; the first error ends all and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            played = [group.create_task(play) for play in plays]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [each.result() for each in played]


def _is_unfit(episode: Episode) -> bool:
    return bool(unfit(episode))


def _is_unscored(episode: Episode) -> bool:
    return unfit(episode) in ("broken", "no_calls", "unscored")


def _as_skyrl(output: GeneratorOutput, names: Sequence[Any], episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the output as SkyRL reads it, in lists, with its own names of trajectories, and with the seconds that
    each took, in all and by what they were spent on."""
    found: dict[str, Any] = {name: _as_list(value) for name, value in msgspec.structs.asdict(output).items()}
    theirs = {TrajectoryId(str(each.instance_id), int(each.repetition_id)): each for each in names}
    spent = {trajectory_of(each): each.stage_ms for each in episodes}
    rows = [spent[each] for each in output.trajectory_ids]
    splits = {"llm": "policy", "env": "environment"}
    return found | {
        "trajectory_ids": [theirs[each] for each in output.trajectory_ids],
        "trajectory_generation_times": [sum(each.values()) / 1000 for each in rows],
        "trajectory_time_splits": {
            name: [each.get(stage, 0.0) / 1000 for each in rows] for name, stage in splits.items()
        },
    }


def _as_list(value: Any) -> Any:
    return [_as_list(each) for each in value] if isinstance(value, tuple) else value
