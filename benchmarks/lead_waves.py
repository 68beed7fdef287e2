"""Measure what searching all leads at once is worth before anything is learned: the F1 of the first documents of the
evidence order, and of the gold among them, after the question and after each wave of leads.

    python benchmarks/lead_waves.py $DATA/hotpotqa --index I [--split train] [--limit 300] [--waves 2] [--set A.B=VALUE]
        [--beside scripted]

The environment is that of `--config sft/handles`, with as many turns as the waves need, in a window of 8,192 tokens,
which shows more documents of a search than a small one; `--set env.context_window=2048` shows what a small model sees.
`--beside` also plays a policy that has learned nothing, in the default environment (--set changes only its retrieval):
the F1 of the first documents that it delivers, and that of the last wave minus it, with 95 % bootstrap intervals of the
differences by task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.systems import signed
from harness1 import SearchEnv, open_retriever, rollout
from harness1.config import Config, load_config
from harness1.data.leaks import gold_set
from harness1.data.open import open_source
from harness1.env.render.context import Context
from harness1.eval.statistics import paired_difference
from harness1.policy.policy import Decision, Policy
from harness1.policy.registry import PLAIN, open_policy
from harness1.policy.scripted import search_call
from harness1.records import Episode, Status, Task, ToolCall, UnitId
from harness1.reward.outcome import delivered
from harness1.tools.end_search import END_SEARCH

Orders = Mapping[str, Sequence[UnitId]]
"""Units by task, the best first."""
FIRST = (1, 2, 3)
AMONG = 4
"""Documents among which the gold is looked for."""
ROOM = "env.context_window=8192"


class Waves:
    """A policy that searches the question, then all leads, a given number of times, and keeps what it was shown."""

    name = hash = "waves"

    def __init__(self, waves: int) -> None:
        self.waves = waves
        self.orders: dict[str, list[list[UnitId]]] = {}
        """By task, the evidence order after the question and after each wave."""

    def open(self, task: Task, seed: int) -> WavesSession:
        return WavesSession(self.waves, self.orders.setdefault(task.task_id, []))


class WavesSession:
    """One episode."""

    def __init__(self, waves: int, orders: list[list[UnitId]]) -> None:
        self._waves, self._orders, self._turn = waves, orders, 0

    async def act(self, context: Context) -> Decision:
        view, self._turn = context.view, self._turn + 1
        if self._turn == 1:
            return Decision((search_call(view.handle or view.query),))
        named = {handle: document.unit_id for handle, document in view.documents.items()}
        self._orders.append([named[handle] for handle in view.ranked if handle in named])
        if view.leads and self._turn <= 1 + self._waves:
            return Decision((search_call(*(lead.entity or lead.name for lead in view.leads)),))
        return Decision((ToolCall(END_SEARCH),))

    def fork(self) -> WavesSession:
        raise NotImplementedError


def f1(chosen: Sequence[UnitId], gold: set[UnitId]) -> float:
    """Return the F1 of some units; 0 for none."""
    return 2 * len(gold.intersection(chosen)) / (len(chosen) + len(gold)) if chosen else 0.0


def measure(
    dataset: str,
    index: str,
    split: str,
    limit: int,
    waves: int,
    settings: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return a row for the state after the question and after each wave (an episode that ends early keeps its last
    state), and a row for each policy to compare with."""
    tasks = [task for task in open_source(dataset).tasks(split) if task.gold][: limit or None]
    turns = f"env.max_turns={waves + 3}"  # the question, the waves, the turn that reads the last one, the end
    config = load_config("sft/handles", [ROOM, turns, *settings])
    retriever = open_retriever(index, config)
    env, policy = SearchEnv(config.env, retriever), Waves(waves)
    for task in tasks:
        played(env, policy, task)
    gold = {task.task_id: {UnitId(doc_id) for doc_id in gold_set(task.gold)} for task in tasks}
    rows, order = [], {}
    for wave in range(waves + 1):
        orders = {task_id: policy.orders[task_id] or [[]] for task_id in gold}
        order = {task_id: found[min(wave, len(found) - 1)] for task_id, found in orders.items()}
        row: dict[str, Any] = {"waves": wave, "tasks": len(tasks)}
        row |= {f"f1_of_first_{k}": fmean(firsts(order, gold, k).values()) for k in FIRST}
        seen = {task_id: [unit for unit in order[task_id][:AMONG] if unit in right] for task_id, right in gold.items()}
        rows.append(row | {f"f1_of_gold_among_{AMONG}": fmean(firsts(seen, gold, AMONG).values())})
    plain = SearchEnv(load_config(None).env, retriever)
    for name in beside:
        other = {task.task_id: delivered(played(plain, open_policy(name), task)) for task in tasks}
        rows.append({"policy": name, "tasks": len(tasks)} | compared(order, other, gold))
    return rows


def played(env: SearchEnv, policy: Policy, task: Task) -> Episode:
    """Return an episode; raise SystemExit if a fault ended it, which would count as a bad result."""
    episode = asyncio.run(rollout(env, policy, task))
    if episode.status is Status.INFRA_ERROR:
        raise SystemExit(f"lead_waves: a fault ended task {task.task_id}: {episode.error}")
    return episode


def firsts(order: Orders, gold: Mapping[str, set[UnitId]], k: int) -> dict[str, float]:
    """Return the F1 of the first k units for each task."""
    return {task_id: f1(order[task_id][:k], right) for task_id, right in gold.items()}


def compared(last_wave: Orders, other: Orders, gold: Mapping[str, set[UnitId]]) -> dict[str, Any]:
    """Return the F1 of the first documents that a policy delivered, and by how much the orders of the last wave are
    above it, paired by task."""
    row: dict[str, Any] = {}
    for k in FIRST:
        ours, theirs = firsts(last_wave, gold, k), firsts(other, gold, k)
        found = paired_difference(ours, theirs, Config().machine.bootstrap)
        row[f"f1_of_first_{k}"] = fmean(theirs.values())
        row[f"last_wave_minus_it_{k}"] = [found.mean, found.low, found.high]
    return row


def shown(value: object) -> str:
    """Return a value of a row for a reader: a list is a difference with its interval."""
    if isinstance(value, list):
        return signed(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--index", required=True)
    parser.add_argument("--split", default="train")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="A.B=VALUE")
    parser.add_argument("--beside", action="append", default=[], choices=PLAIN, help="a policy without a model")
    parser.add_argument("--json", action="store_true", dest="as_json")
    asked = parser.parse_args(arguments)
    rows = measure(asked.dataset, asked.index, asked.split, asked.limit, asked.waves, asked.settings, asked.beside)
    if asked.as_json:
        print(json.dumps(rows))
    for row in () if asked.as_json else rows:
        print("  ".join(f"{name} {shown(value)}" for name, value in row.items()))
    return rows


if __name__ == "__main__":
    main()
