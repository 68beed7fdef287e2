"""Groups of episodes as the `GeneratorOutput` of SkyRL's step-wise training: an entry for each model call.

The fields are those of `skyrl/train/generators/base.py`. The checks are those of SkyRL's `validate_generator_output`
and mini-batches (SkyRL 0.4.0), and the further assumptions of its advantages.

Its mini-batches count prompts, so an instance with a fault cannot be left out of a batch that SkyRL asked for: each of
its trajectories becomes a placeholder, a single step without a trained token, as in SkyRL's own Harbor generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

from harness1.records import Episode, Record
from harness1.rl.training_rows import rewards_of
from harness1.rows.calls import captured_calls

Ids = tuple[int, ...]
Numbers = tuple[float, ...]
FAULT = "error"
"""The `stop_reason` of a placeholder."""


class TrajectoryId(Record):
    """The name of an episode (SkyRL's `TrajectoryID`). Episodes of one instance form a group."""

    instance_id: str
    repetition_id: int


class GeneratorOutput(Record):
    """A batch. Every tuple has one entry for each step, which is one model call. The steps of an episode are adjacent
    and in order, and so are the episodes of a group.

    Raises:
        ValueError: the trainer would refuse the batch, or misinterpret it.
    """

    prompt_token_ids: tuple[Ids, ...]
    response_ids: tuple[Ids, ...]
    """The sampled tokens only."""
    rewards: tuple[Numbers, ...]
    """One for each token of the response: the episode's reward on its last token, 0 on all others."""
    loss_masks: tuple[Ids, ...]
    stop_reasons: tuple[str, ...]
    rollout_metrics: dict[str, float]
    """Metrics of the batch for the trainer's log."""
    rollout_logprobs: tuple[Numbers, ...]
    """Natural logarithms as recorded when sampling, one for each token of the response."""
    trajectory_ids: tuple[TrajectoryId, ...]
    is_last_step: tuple[bool, ...]

    def __post_init__(self) -> None:
        _check_lengths(self)
        _check_numbers(self)
        _check_steps(self)
        _check_groups(self)


def generator_output(
    groups: Iterable[Sequence[Episode]],
    is_broken: Callable[[Episode], bool] = lambda episode: False,
    *,
    compared: bool = True,
) -> GeneratorOutput:
    """Return the steps of some groups. All episodes but the broken ones have a reward and log probabilities.

    Args:
        is_broken: an instance with an episode for which this is true becomes placeholders.
        compared: the rewards of a group are compared with each other, so a group has several episodes; false for a
            validation.

    Raises:
        ValueError: as `GeneratorOutput`, or a group that is compared has only one episode.
        SchemaError: a segment of a prompt is missing in its episode.
    """
    steps: list[_Step] = []
    sound: list[Episode] = []
    faulty = 0
    for group in groups:
        # The trainer would use the reward of a single trajectory as its advantage.
        alone = compared and len(group) == 1
        _demand(not alone, f"instance {instance_of(group[0])} has only one trajectory")
        if any(map(is_broken, group)):
            steps += map(_placeholder, group)
            faulty += 1
        else:
            steps += [step for episode in group for step in _steps(episode)]
            sound += group
    _demand(bool(steps), "there is no step")
    columns: dict[str, Any] = dict(zip(_Step._fields, zip(*steps, strict=True), strict=False))
    return GeneratorOutput(**columns, rollout_metrics=_metrics(sound, len(steps), faulty))


def _metrics(episodes: Sequence[Episode], steps: int, faulty: int) -> dict[str, float]:
    found = {"harness1/episodes": float(len(episodes)), "harness1/faulty_instances": float(faulty)}
    if not episodes:
        return found
    versions = [version for episode in episodes for version in episode.policy_versions]
    return found | {
        "harness1/mean_reward": fmean(rewards_of(episodes)),
        "harness1/mean_steps": steps / len(episodes),
        "harness1/min_version": float(min(versions)),
        "harness1/max_version": float(max(versions)),
    }


def instance_of(episode: Episode) -> str:
    """Return the group of an episode, or its task if it was not played in groups."""
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


def trajectory_of(episode: Episode) -> TrajectoryId:
    """Return the name of an episode."""
    return TrajectoryId(instance_of(episode), episode.sample_idx)


def _placeholder(episode: Episode) -> _Step:
    return _Step((0,), (0,), (0.0,), (0,), FAULT, (0.0,), trajectory_of(episode), True)


def _steps(episode: Episode) -> Iterator[_Step]:
    calls = list(captured_calls(episode))
    name = trajectory_of(episode)
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


def _check_lengths(output: GeneratorOutput) -> None:
    steps = len(output.response_ids)
    _demand(steps > 0, "there is no step")
    for name in _Step._fields:
        _demand(len(getattr(output, name)) == steps, f"{name} does not have one entry for each of {steps} steps")
    for at, response in enumerate(output.response_ids):
        _demand(len(output.prompt_token_ids[at]) > 0 and len(response) > 0, f"step {at} has no prompt or no response")
        for name in ("rewards", "loss_masks", "rollout_logprobs"):
            numbers = getattr(output, name)[at]
            _demand(len(numbers) == len(response), f"{name} of step {at} does not have one number for each token")


def _check_numbers(output: GeneratorOutput) -> None:
    for at, mask in enumerate(output.loss_masks):
        if not _is_placeholder(output, at):
            _demand(all(one == 1 for one in mask), f"step {at} has a token that is not trained")
        _demand(all(map(isfinite, output.rollout_logprobs[at])), f"step {at} has a log probability that is not finite")
        _demand(all(map(isfinite, output.rewards[at])), f"step {at} has a reward that is not finite")


def _check_steps(output: GeneratorOutput) -> None:
    names = output.trajectory_ids
    _demand(_adjacent(names), "the steps of a trajectory are not adjacent")
    ends = [one != other for one, other in pairwise(names)] + [True]
    _demand(list(output.is_last_step) == ends, "is_last_step does not mark the last step of each trajectory")
    # The trainer reads the reward only from the last token of the last step.
    for at, rewards in enumerate(output.rewards):
        _demand(not any(rewards[:-1] if ends[at] else rewards), f"step {at} has a reward before the end")


def _check_groups(output: GeneratorOutput) -> None:
    ends = [at for at, last in enumerate(output.is_last_step) if last]
    names = [output.trajectory_ids[at].instance_id for at in ends]
    _demand(_adjacent(names), "the trajectories of an instance are not adjacent")
    kinds = {(name, _is_placeholder(output, at)) for name, at in zip(names, ends, strict=True)}
    _demand(len(kinds) == len(set(names)), "an instance has placeholders and other trajectories")


def _is_placeholder(output: GeneratorOutput, at: int) -> bool:
    """Return True for the one step of a trajectory of an instance with a fault."""
    tokens = (output.prompt_token_ids[at], output.response_ids[at], output.loss_masks[at], output.rewards[at])
    return output.stop_reasons[at] == FAULT and tokens == ((0,), (0,), (0,), (0.0,))


def _adjacent(names: Sequence[object]) -> bool:
    runs = [name for name, _ in groupby(names)]
    return len(runs) == len(set(runs))


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
