"""Run folders made by hand, over a small dataset on disk: what their episodes deliver is written in the test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.eval.evaluate import Evaluation, write_metrics
from harness1.records import (
    STATUS_OF,
    Curated,
    Episode,
    Hashes,
    Observation,
    StopReason,
    Tag,
    Task,
    ToolCall,
    Turn,
    UnitId,
)
from harness1.runs.files import under_way
from harness1.runs.folder import run_stage
from harness1.runs.journal import EpisodeStore

CONFIG = load_config(overrides=["machine.bootstrap=200"])
GOLD = "ab"
"""The documents that are relevant for every task, each named by a letter."""


def dataset(folder: Path, queries: Mapping[str, str], split: str = "test", gold: str = GOLD) -> Path:
    """A BEIR folder with documents a to z, and these tasks."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    _lines(folder / "corpus.jsonl", ({"_id": name, "title": name, "text": f"Text {name}."} for name in letters))
    _lines(folder / "queries.jsonl", ({"_id": name, "text": text} for name, text in queries.items()))
    judged = [f"{task}\t{doc}\t1" for task in queries for doc in gold]
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n")
    return folder


def episode(
    task: str, delivered: str, *, sample: int = 0, pool: str | None = None, tags: str = "", turns: int = 0, **more: Any
) -> Episode:
    """An episode that delivers documents in their order.

    Args:
        tags: the first letter of the tag of each; `fair` where none is given.
        turns: how many it took, each a search of 100 tokens.
    """
    stop = more.pop("stop", StopReason.END_SEARCH)
    names: dict[str, Tag] = {"v": "very_high", "h": "high", "f": "fair", "l": "low"}
    placed = zip(delivered, tags.ljust(len(delivered), "f"), range(1, len(delivered) + 1), strict=True)
    return Episode(
        episode_id=f"{task}-{sample}",
        task=Task(task, "?"),
        sample_idx=sample,
        turns=tuple(_turn(index) for index in range(turns)),
        stop_reason=stop,
        status=STATUS_OF[stop],
        curated=tuple(Curated(UnitId(unit), names[tag], rank) for unit, tag, rank in placed),
        pool=tuple(UnitId(unit) for unit in (delivered if pool is None else pool)),
        hashes=Hashes("env", "policy", "index"),
        **more,
    )


def run_folder(
    folder: Path,
    data: Path,
    episodes: Iterable[Episode],
    *,
    config: Config = CONFIG,
    policy: str = "by-hand",
    split: str = "test",
    tasks: Iterable[str] | None = None,
    samples: int = 1,
    **inputs: Any,
) -> Path:
    """A finished run folder with all that is made of its episodes.

    Args:
        tasks: of the run; default all of the dataset.
        inputs: of its card, in place of the usual ones.
    """
    known = {task.task_id: task for task in open_source(str(data)).tasks(split)}
    chosen = [known[name] for name in (known if tasks is None else tasks)]
    card = {"dataset": str(data), "split": split, "tasks": [task.task_id for task in chosen], "samples": samples}
    hashes = {name: str(inputs.pop(name, name)) for name in ("env", "policy", "index")}
    card |= {"seed": 0, "reward": config.reward_hash, **hashes, **inputs}
    stage = run_stage(config, policy, card, "an-index", hashes)
    stage = msgspec.structs.replace(stage, outputs={**stage.outputs, "source": str(data)})
    evaluation = Evaluation(str(data), split, chosen, "an-index", policy, config, samples)
    with EpisodeStore(folder) as store, under_way(stage, folder):
        for each in episodes:
            task = known[each.task.task_id].public()
            store.append(msgspec.structs.replace(each, task=task, hashes=Hashes(**hashes)))
    write_metrics(evaluation, stage, folder)
    return folder


def _turn(index: int) -> Turn:
    search = ToolCall("search_corpus", {"query": "q"})
    return Turn(index, action=search, observation=Observation(search.name), prompt_tokens=100, prefill_tokens=40)


def _lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
