"""Measure the cost of each rendering order for a trainer: tokens run through the model per episode, and trained tokens.

A teacher without a model acts on the same tasks under each order, in the compact format of a tokenizer. Its episodes
become rows as in reinforcement learning: one for each turn, or one for each chain of turns whose prompts are prefixes
of each other (`rl.rows`). Means over episodes.

    python benchmarks/rl_rows.py [--tokenizer smollm2-135m] [--config FILE] [--tasks N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import load_config
from harness1.data.world.generate import world_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.models.chat_format import ChatFormat
from harness1.models.fetch import resolve_model
from harness1.models.formats import open_format
from harness1.models.tokenizer import open_tokenizer
from harness1.policy.teacher.teacher import OracleTeacher
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Episode, Task
from harness1.retrieval.index.build import build_index
from harness1.retrieval.index.index import open_index
from harness1.retrieval.index.retriever import EmbeddedRetriever
from harness1.retrieval.protocol import Retriever
from harness1.rows.calls import captured_calls
from harness1.rows.merging import prefix_merging
from harness1.rows.row import TrainRow, per_request
from harness1.training.micro_batch import trained_tokens

SMALL = "small"
ORDERS = ("paper", "stable_first", "epoch")
KINDS = ("turn", "epoch")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    options = _options(arguments)
    chat = open_format("compact", open_tokenizer(resolve_model(options.tokenizer)))
    world = world_source(options.world)
    tasks = world.tasks("train")[: options.tasks]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        build_index(world.documents(), Path(folder), load_config(options.config).index)
        retriever = EmbeddedRetriever(open_index(Path(folder)))
        for order in ORDERS:
            episodes = asyncio.run(played(order, tasks, retriever, chat, options.config))
            rows += [{"order": order, "rows": kind, **measured(episodes, kind)} for kind in KINDS]
    dearest = rows[0]["forward_tokens"]
    for row in rows:
        row["ratio"] = round(row["forward_tokens"] / dearest, 3)
    report = {"tokenizer": options.tokenizer, "episodes": len(tasks), "orders": rows}
    print(json.dumps(report) if options.json else _table(report))
    return report


async def played(
    order: str, tasks: Sequence[Task], retriever: Retriever, chat: ChatFormat, config_file: Path
) -> list[Episode]:
    """Return the teacher's episodes under an order, in the tokenizer's format."""
    config = load_config(config_file, [f"env.rendering.order={order}"])
    teacher = OracleTeacher({task.task_id: task.gold for task in tasks if task.gold is not None})
    policy = StudentFormatPolicy(teacher, chat)
    return [
        await rollout(SearchEnv(config.env, retriever, counter=chat, machine=config.machine), policy, task)
        for task in tasks
    ]


def measured(episodes: Sequence[Episode], kind: str) -> dict[str, float]:
    """Return the means over episodes of rows of one kind."""
    made = [training_rows_of(episode, kind) for episode in episodes]
    return {
        "turns": fmean(len(episode.turns) for episode in episodes),
        "rows_per_episode": fmean(map(len, made)),
        "forward_tokens": round(fmean(sum(len(row.token_ids) for row in rows) for rows in made), 1),
        "trained_tokens": round(fmean(sum(map(trained_tokens, rows)) for rows in made), 1),
    }


def training_rows_of(episode: Episode, kind: str) -> tuple[TrainRow, ...]:
    """Return the rows of an episode, regardless of its reward."""
    calls = captured_calls(episode)
    return per_request(calls) if kind == "turn" else prefix_merging(calls).rows


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rl_rows", description="Tokens of a trainer under each rendering order.")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="a model, by name or folder")
    parser.add_argument("--config", default=SMALL)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--world", type=int, default=60, help="documents of the synthetic world")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def _table(report: dict[str, Any]) -> str:
    head = f"Means over {report['episodes']} episodes, tokenizer {report['tokenizer']}"
    columns = ("turns", "rows", "forward", "trained", "to first")
    lines = [head, "\n" + f"{'order':14}{'kind':8}" + "".join(f"{column:>10}" for column in columns)]
    for row in report["orders"]:
        order, kind, *values = row.values()
        lines.append(f"{order:14}{kind:8}" + "".join(f"{value:10.6g}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
