"""Looking at a policy while it is trained: its loss on held-out rows, its turns, and whole episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean

import msgspec

from harness1.env.environment import SearchEnv, choose
from harness1.episodes.rollout import rollout
from harness1.models.backend import Backend
from harness1.models.formats.chat_format import ChatFormat
from harness1.policy.policy import Policy
from harness1.records import Record, Sampling, Status, Task, ToolCall
from harness1.reward.outcome import outcome
from harness1.rows.row import TrainRow
from harness1.tools.registry import Toolbox

HIGHER = {"nll": False, "valid": True, "tool_agreement": True, "curated_recall": True, "reward": True}
"""The metrics by which a checkpoint can be the best, and whether more of each is better."""


class HeldOutTurn(Record):
    """A turn that a teacher took and the policy is asked to take: the prompt, and what the teacher said there."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


def held_out_turns(rows: Sequence[TrainRow], limit: int) -> list[HeldOutTurn]:
    """The trained stretches of rows as turns: `limit` of them at most, spread evenly over all."""
    found = [turn for row in rows for turn in _turns(row)]
    if limit >= len(found):
        return found
    return [found[at * len(found) // limit] for at in range(limit)]


def _turns(row: TrainRow) -> Iterator[HeldOutTurn]:
    mask = (*row.loss_mask, 0)
    begin = 0
    for place in range(1, len(mask)):
        if mask[place] and not mask[place - 1]:
            begin = place
        elif mask[place - 1] and not mask[place]:
            yield HeldOutTurn(row.token_ids[:begin], row.token_ids[begin:place])


def is_valid(call: ToolCall, toolbox: Toolbox) -> bool:
    """Whether an environment would carry out a call: there is the tool, and the arguments are of its schema."""
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
    """The policy's most likely output at each turn, beside the teacher's.

    Args:
        reserve: tokens that an output may have.

    Returns:
        For each turn, 1.0 or 0.0: `valid`, the output holds an action that an environment would carry out;
        `tool_agreement`, the action calls the teacher's tool; `action_agreement`, with the same arguments, too.
    """
    sampling = Sampling(temperature=0.0, max_tokens=reserve, stop_ids=chat.stop_ids)

    async def one(turn: HeldOutTurn) -> dict[str, float]:
        output = await backend.generate(turn.prompt_ids, sampling)
        said = _action(chat, output.output_ids, toolbox)
        meant = _action(chat, turn.target_ids, toolbox)
        return {
            "valid": float(said is not None and is_valid(said, toolbox)),
            "tool_agreement": float(said is not None and meant is not None and said.name == meant.name),
            "action_agreement": float(said is not None and said == meant),
        }

    return list(await asyncio.gather(*(one(turn) for turn in turns)))


async def turn_metrics(
    backend: Backend, chat: ChatFormat, toolbox: Toolbox, turns: Sequence[HeldOutTurn], reserve: int
) -> dict[str, float]:
    """The means of `turn_results`."""
    return means(await turn_results(backend, chat, toolbox, turns, reserve))


def means(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each value; empty without results."""
    return {name: fmean(each[name] for each in results) for name in results[0]} if results else {}


def _action(chat: ChatFormat, ids: Sequence[int], toolbox: Toolbox) -> ToolCall | None:
    actions = chat.parse(ids, toolbox.specs).actions
    return choose(actions)[0] if actions else None


async def episode_results(
    policy: Policy, environment: Callable[[], SearchEnv], tasks: Sequence[Task], concurrency: int, seed: int = 0
) -> list[dict[str, float]]:
    """Whole episodes on tasks with gold. One that the infrastructure broke is left out.

    Returns:
        For each episode `curated_recall`, `set_size`, `turns`, and `format_failures`: 1.0 if it ended without an
        action.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> dict[str, float] | None:
        async with places:
            episode = await rollout(environment(), policy, task, seed=seed)
        if episode.status is Status.INFRA_ERROR:
            return None
        result = outcome(episode, task.gold)
        return {
            "curated_recall": result.recall,
            "set_size": float(result.set_size),
            "turns": float(result.turns),
            "format_failures": float(episode.status is Status.POLICY_ERROR),
        }

    return [each for each in await asyncio.gather(*(one(task) for task in tasks)) if each is not None]


async def episode_metrics(
    policy: Policy, environment: Callable[[], SearchEnv], tasks: Sequence[Task], concurrency: int, seed: int = 0
) -> dict[str, float]:
    """The means of `episode_results`."""
    return means(await episode_results(policy, environment, tasks, concurrency, seed))


@dataclass
class Best:
    """The best value of a metric so far, and for how many looks there was no better one."""

    metric: str
    value: float | None = None
    stale: int = 0

    def take(self, metrics: dict[str, float]) -> bool:
        """Take in a look; returns whether it is the best so far. Without the metric it is not."""
        found = metrics.get(self.metric)
        better = (found is not None and not isnan(found)) and (
            self.value is None or (found > self.value if HIGHER[self.metric] else found < self.value)
        )
        self.value, self.stale = (found, 0) if better else (self.value, self.stale + 1)
        return better
