"""The throughput table of `retrieval.py`: groups of equal episodes over a hybrid index, all at once in one process.

There are three settings, each with its own retriever: every search by itself, searches of concurrent episodes in
batches, and batches with the cache of results, from which the members of a group profit. Only the last caches query
embeddings. Memory is what all episodes, including their records, hold at their ends, divided by their number; it is
counted in a separate pass, because counting takes time.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness1.config import Config, load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.policy.registry import open_policy
from harness1.records import Chunk, ChunkId, DocId, Episode, Task
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, Retriever, SearchRequest, SearchResult

TASKS, GROUP, PASSES = 32, 8, 3
SETTINGS = {
    "each by itself": ["machine.batch_ms=0", "machine.batch_size=1", "machine.cached_searches=0"],
    "batched": ["machine.cached_searches=0"],
    "batched and cached": [],
}
DEADLINES = ["machine.call_deadline_s=600", "machine.episode_deadline_s=3600"]
Row = dict[str, Any]


def throughput_table(dataset: str, folder: Path, model: str) -> list[Row]:
    """Return a row for each setting, with the gain over the previous one and over the first."""
    source = open_source(dataset)
    ensure_index(source, folder / source.name, load_config(None, [f"index.dense.model={model}"]))
    tasks = source.tasks("test")[:TASKS]
    passes: dict[str, list[Row]] = {name: [] for name in SETTINGS}
    for _ in range(PASSES):
        for name, overrides in SETTINGS.items():
            config = load_config(None, ["env.retrieval.mode=hybrid", *DEADLINES, *overrides])
            passes[name].append(asyncio.run(_measure(folder / source.name, config, tasks)))
    rows: list[Row] = []
    for name, found in passes.items():
        row: Row = {"setting": name} | {key: statistics.median(each[key] for each in found) for key in found[0]}
        row["gain"] = row["searches_per_s"] / rows[-1]["searches_per_s"] if rows else 1.0
        row["gain_in_all"] = row["searches_per_s"] / rows[0]["searches_per_s"] if rows else 1.0
        rows.append(row)
    rows[-1]["kb_per_episode"] = asyncio.run(_held(folder / source.name, config, tasks)) / 1024
    return rows


async def _held(index: Path, config: Config, tasks: Sequence[Task]) -> float:
    """Return the bytes that an open episode holds at its end, without the shared caches that a first round filled."""
    retriever = open_retriever(str(index), config)
    await _run(retriever, config, tasks)
    gc.collect()
    tracemalloc.start()
    opened = await _run(retriever, config, tasks)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / len(opened)


async def _run(retriever: Retriever, config: Config, tasks: Sequence[Task]) -> list[tuple[SearchEnv, Episode]]:
    """Run all groups at once, to their ends."""
    policy = open_policy("scripted", {})

    async def one(task: Task, sample: int) -> tuple[SearchEnv, Episode]:
        env = SearchEnv(config.env, retriever, machine=config.machine)
        episode = await rollout(env, policy, task.public(), seed=0, sample_idx=sample)
        assert episode.error is None, episode.error
        return env, episode

    return await asyncio.gather(*(one(task, sample) for task in tasks for sample in range(GROUP)))


async def _measure(index: Path, config: Config, tasks: Sequence[Task]) -> Row:
    """Run all episodes at once and count what they searched."""
    retriever = _Counted(open_retriever(str(index), config))
    await retriever.search([SearchRequest("warm up", 1)])
    retriever.searches = 0
    begin = time.perf_counter()
    episodes = [episode for _, episode in await _run(retriever, config, tasks)]
    seconds = time.perf_counter() - begin
    return {
        "episodes": len(episodes),
        "turns": sum(len(episode.turns) for episode in episodes),
        "searches": retriever.searches,
        "seconds": seconds,
        "searches_per_s": retriever.searches / seconds,
    }


class _Counted:
    """A retriever that counts its calls."""

    def __init__(self, inner: Retriever) -> None:
        self._inner, self.searches = inner, 0

    @property
    def info(self) -> IndexInfo:
        return self._inner.info

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        self.searches += len(requests)
        return await self._inner.search(requests)

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        return await self._inner.grep(pattern, limit, deadline)

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        return await self._inner.read(doc_id)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        return await self._inner.get(chunk_ids)
