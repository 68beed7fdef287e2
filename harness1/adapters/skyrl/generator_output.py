"""Groups of episodes in the shape that SkyRL's trainer takes of a generator when it trains step by step: one entry for
each model call, with its exact tokens.

The fields are those of `GeneratorOutput` in `skyrl/train/generators/base.py`, and what must hold is what SkyRL's
`validate_generator_output` and its mini-batches demand (SkyRL 0.4.0), with what its advantages assume beyond that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

from harness1.records import Episode, Record
from harness1.rl.training_rows import rewards_of
from harness1.rows.calls import captured_calls

Ids = tuple[int, ...]
Numbers = tuple[float, ...]


class TrajectoryId(Record):
    """The name of an episode, as SkyRL's `TrajectoryID`: those of one instance are compared with each other."""

    instance_id: str
    repetition_id: int


class GeneratorOutput(Record):
    """A batch. Every tuple has one entry for each step, which is one model call; those of an episode stand together in
    the order made, and so do the episodes of a group.

    Raises:
        ValueError: what the trainer would refuse, or take for something else than it is.
    """

    prompt_token_ids: tuple[Ids, ...]
    response_ids: tuple[Ids, ...]
    """What was sampled, and nothing else."""
    rewards: tuple[Numbers, ...]
    """One for each token of the response: that of the episode on its very last token, 0 on all others."""
    loss_masks: tuple[Ids, ...]
    stop_reasons: tuple[str, ...]
    rollout_metrics: dict[str, float]
    """Of the batch; the trainer writes them into its log."""
    rollout_logprobs: tuple[Numbers, ...]
    """Natural logarithms as recorded when sampling, one for each token of the response."""
    trajectory_ids: tuple[TrajectoryId, ...]
    is_last_step: tuple[bool, ...]

    def __post_init__(self) -> None:
        check_lengths(self)
        check_numbers(self)
        check_steps(self)
        check_groups(self)


def generator_output(groups: Iterable[Sequence[Episode]]) -> GeneratorOutput:
    """The steps of some groups, all of whose episodes have a reward and log probabilities.

    Raises:
        ValueError: it would not be a batch that SkyRL trains as it is meant.
        SchemaError: an episode does not hold a stretch of a prompt.
    """
    batch = [list(group) for group in groups]
    episodes = [episode for group in batch for episode in group]
    steps = [step for episode in episodes for step in _steps(episode)]
    columns: dict[str, Any] = dict(zip(_Step._fields, zip(*steps, strict=True), strict=False))
    if not columns:
        raise ValueError("there is no step")
    versions = [version for episode in episodes for version in episode.policy_versions]
    metrics = {
        "harness1/mean_reward": fmean(rewards_of(episodes)),
        "harness1/mean_steps": len(steps) / len(episodes),
        "harness1/episodes": float(len(episodes)),
        "harness1/min_version": float(min(versions)),
        "harness1/max_version": float(max(versions)),
    }
    return GeneratorOutput(**columns, rollout_metrics=metrics)


def instance_of(episode: Episode) -> str:
    """What an episode is grouped by: its group, or its task where it was not played in groups."""
    return episode.task.task_id if episode.group_id is None else episode.group_id


class _Step(NamedTuple):
    prompt_token_ids: Ids
    response_ids: Ids
    rewards: Numbers
    loss_masks: Ids
    stop_reasons: str
    rollout_logprobs: Numbers
    trajectory_ids: TrajectoryId
    is_last_step: bool


def _steps(episode: Episode) -> Iterator[_Step]:
    calls = list(captured_calls(episode))
    name = TrajectoryId(instance_of(episode), episode.sample_idx)
    earned = 0.0 if episode.reward is None else episode.reward.total
    for place, call in enumerate(calls, start=1):
        size, last = len(call.output_ids), place == len(calls)
        yield _Step(
            prompt_token_ids=call.prompt_ids,
            response_ids=call.output_ids,
            rewards=(0.0,) * (size - 1) + (earned if last else 0.0,),
            loss_masks=(1,) * size,
            stop_reasons=call.finish_reason,
            rollout_logprobs=call.output_logprobs or (),
            trajectory_ids=name,
            is_last_step=last,
        )


def check_lengths(output: GeneratorOutput) -> None:
    """
    Raises:
        ValueError: there is no step, steps lack an entry of a field, prompts or responses are empty, or tokens lack a
            number.
    """
    steps = len(output.response_ids)
    _demand(steps > 0, "there is no step")
    for name in _Step._fields:
        _demand(len(getattr(output, name)) == steps, f"{name} has not one entry for each of {steps} steps")
    for at, response in enumerate(output.response_ids):
        _demand(len(output.prompt_token_ids[at]) > 0 and len(response) > 0, f"step {at} has no prompt or no response")
        for name in ("rewards", "loss_masks", "rollout_logprobs"):
            numbers = getattr(output, name)[at]
            _demand(len(numbers) == len(response), f"{name} of step {at} has not one number for each token")


def check_numbers(output: GeneratorOutput) -> None:
    """
    Raises:
        ValueError: a number is not finite, or a sampled token is not trained.
    """
    for at, mask in enumerate(output.loss_masks):
        _demand(all(one == 1 for one in mask), f"step {at} has a token that is not trained")
        _demand(all(map(isfinite, output.rollout_logprobs[at])), f"step {at} has a log probability that is not finite")
        _demand(all(map(isfinite, output.rewards[at])), f"step {at} has a reward that is not finite")


def check_steps(output: GeneratorOutput) -> None:
    """
    Raises:
        ValueError: steps of a trajectory stand apart, another than its last is marked as that, or a reward stands
            elsewhere than on the last token of its last step, where alone the trainer looks for it.
    """
    names = output.trajectory_ids
    _demand(_stand_together(names), "the steps of a trajectory stand apart")
    ends = [one != other for one, other in pairwise(names)] + [True]
    _demand(list(output.is_last_step) == ends, "is_last_step does not mark the last step of each trajectory")
    for at, rewards in enumerate(output.rewards):
        _demand(not any(rewards[:-1] if ends[at] else rewards), f"step {at} has a reward before the end")


def check_groups(output: GeneratorOutput) -> None:
    """
    Raises:
        ValueError: trajectories of an instance stand apart, or one is the only one of its instance: the trainer would
            take its reward for an advantage.
    """
    ends = [name.instance_id for name, last in zip(output.trajectory_ids, output.is_last_step, strict=True) if last]
    _demand(_stand_together(ends), "the trajectories of an instance stand apart")
    for instance, group in groupby(ends):
        _demand(len(list(group)) > 1, f"instance {instance} has one trajectory, which is compared with nothing")


def _stand_together(names: Sequence[object]) -> bool:
    runs = [name for name, _ in groupby(names)]
    return len(runs) == len(set(runs))


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
