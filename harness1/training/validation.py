"""Validation of a policy during training: single turns compared with a teacher's, and whole episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import TypeVar

import msgspec

from harness1.env.environment import SearchEnv, choose
from harness1.episodes.rollout import rollout
from harness1.models.backend import Backend
from harness1.models.chat_format import ChatFormat
from harness1.policy.policy import Policy
from harness1.records import Record, Sampling, Status, Task, ToolCall
from harness1.reward.measures import measure_outcome
from harness1.rows.row import TrainRow
from harness1.tools.registry import Toolbox

HIGHER = {"nll": False, "valid": True, "tool_agreement": True, "curated_recall": True, "reward": True}
"""The metrics that can choose the best checkpoint; True if higher values are better."""
OF_EPISODES = ("curated_recall", "reward")
"""Those of whole episodes, which the infrastructure may break."""

Item = TypeVar("Item")


class HeldOutTurn(Record):
    """A turn of a teacher that the policy is asked to take: the prompt and the teacher's output."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


def evenly_spaced(items: Sequence[Item], limit: int) -> list[Item]:
    """Return at most `limit` items, spread evenly over all."""
    count = min(limit, len(items))
    return [items[at * len(items) // count] for at in range(count)]


def held_out_turns(rows: Sequence[TrainRow], limit: int) -> list[HeldOutTurn]:
    """Return at most `limit` trained stretches of rows as turns, spread evenly over all."""
    return evenly_spaced([turn for row in rows for turn in _turns(row)], limit)


def _turns(row: TrainRow) -> Iterator[HeldOutTurn]:
    mask = (*row.loss_mask, 0)
    begin = 0
    for place in range(1, len(mask)):
        if mask[place] and not mask[place - 1]:
            begin = place
        elif mask[place - 1] and not mask[place]:
            yield HeldOutTurn(row.token_ids[:begin], row.token_ids[begin:place])


def is_valid(call: ToolCall, toolbox: Toolbox) -> bool:
    """Return True if an environment would execute a call: the tool exists, and the arguments match its schema."""
    tool = toolbox.tools.get(call.name)
    if tool is None:
        return False
    try:
        msgspec.convert(call.arguments, tool.arguments)
    except msgspec.ValidationError:
        return False
    return True


async def turn_results(
    backend: Backend, chat: ChatFormat, toolbox: Toolbox, turns: Sequence[HeldOutTurn], reserve: int
) -> list[dict[str, float]]:
    """Compare the policy's greedy output at each turn with the teacher's.

    Args:
        reserve: maximum tokens of an output.

    Returns:
        For each turn, 1.0 or 0.0: `valid`, the output contains an action that an environment would execute;
        `tool_agreement`, the action calls the teacher's tool; `action_agreement`, with the same arguments.
    """
    sampling = Sampling(temperature=0.0, max_tokens=reserve, stop_ids=chat.stop_ids)

    async def one(turn: HeldOutTurn) -> dict[str, float]:
        output = await backend.generate(turn.prompt_ids, sampling)
        action = _action(chat, output.output_ids, toolbox)
        target = _action(chat, turn.target_ids, toolbox)
        return {
            "valid": float(action is not None and is_valid(action, toolbox)),
            "tool_agreement": float(action is not None and target is not None and action.name == target.name),
            "action_agreement": float(action is not None and action == target),
        }

    return list(await asyncio.gather(*(one(turn) for turn in turns)))


async def turn_metrics(
    backend: Backend, chat: ChatFormat, toolbox: Toolbox, turns: Sequence[HeldOutTurn], reserve: int
) -> dict[str, float]:
    """Return the means of `turn_results`."""
    return means(await turn_results(backend, chat, toolbox, turns, reserve))


def means(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each value; empty without results."""
    return {name: fmean(each[name] for each in results) for name in results[0]} if results else {}


def _action(chat: ChatFormat, ids: Sequence[int], toolbox: Toolbox) -> ToolCall | None:
    actions = chat.parse(ids, toolbox.specs).actions
    return choose(actions)[0] if actions else None


async def episode_results(
    policy: Policy, environment: Callable[[], SearchEnv], tasks: Sequence[Task], concurrency: int, seed: int = 0
) -> list[dict[str, float]]:
    """Play whole episodes on tasks with gold, and leave out those with an infrastructure fault.

    Returns:
        For each episode `curated_recall`, `set_size`, `turns`, and `format_failures`: 1.0 if it ended in a policy
        error.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> dict[str, float] | None:
        async with places:
            episode = await rollout(environment(), policy, task, seed=seed)
        if episode.status is Status.INFRA_ERROR:
            return None
        result = measure_outcome(episode, task.gold)
        return {
            "curated_recall": result.recall,
            "set_size": float(result.set_size),
            "turns": float(result.turns),
            "format_failures": float(episode.status is Status.POLICY_ERROR),
        }

    return [each for each in await asyncio.gather(*(one(task) for task in tasks)) if each is not None]


@dataclass
class Best:
    """The best value of a metric so far, and the number of validations since then (`stale`)."""

    metric: str
    value: float | None = None
    stale: int = 0

    def take(self, metrics: dict[str, float]) -> bool:
        """Take in a validation; return True if it is the best so far, and False if it lacks the metric."""
        value = metrics.get(self.metric)
        better = (value is not None and not isnan(value)) and (
            self.value is None or (value > self.value if HIGHER[self.metric] else value < self.value)
        )
        self.value, self.stale = (value, 0) if better else (self.value, self.stale + 1)
        return better
