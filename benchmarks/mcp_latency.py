"""Time the calls of tools through the Model Context Protocol, beside the same steps without it.

    python benchmarks/mcp_latency.py DATASET --index DIR [--searches 50] [--clients 4] [--json]

The server is `harness1 serve mcp --http` in a process of its own, its clients are those of the package `mcp`. Each
search asks a question of the dataset: `search_corpus` with the question, then with its first five words, `curate`,
`end_search`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from mcp import Client

from harness1.adapters.driven import DrivenEpisode, environments
from harness1.adapters.searches import append_only
from harness1.config import load_config
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeSetup
from harness1.records import Task, ToolCall

Take = Callable[[str, dict[str, Any]], Coroutine[Any, Any, object]]


async def steps(question: str, take: Take) -> list[float]:
    """Carry out the calls of a search; return the milliseconds of each."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("search_corpus", {"query": question}),
        ("search_corpus", {"query": " ".join(question.split()[:5])}),
        ("curate", {"add_ids": ["D1"]}),
        ("end_search", {"reasoning": "done"}),
    ]
    found = []
    for name, arguments in calls:
        began = time.perf_counter()
        await take(name, arguments)
        found.append(1000 * (time.perf_counter() - began))
    return found


async def through_mcp(address: str, questions: Sequence[str], clients: int) -> list[float]:
    """Play every question once, `clients` at a time."""
    left, found = list(questions), []

    async def client() -> None:
        async with Client(address) as session:
            while left:
                question = left.pop()
                began = await session.call_tool("start_search", {"question": question})
                named = {"search": (began.structured_content or {})["search"]}

                async def take(name: str, arguments: dict[str, Any], named: dict[str, Any] = named) -> object:
                    return await session.call_tool(name, {**named, **arguments})

                found.extend(await steps(question, take))

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def without(index: str, questions: Sequence[str]) -> list[float]:
    """Play every question once in this process."""
    open_env, found = environments(EpisodeSetup(append_only(load_config()), index, "mcp")), []
    for question in questions:
        episode = DrivenEpisode(open_env(), Task("t", question), "mcp")
        await episode.begin()

        async def take(name: str, arguments: dict[str, Any], episode: DrivenEpisode = episode) -> object:
            return await episode.act(ToolCall(name, arguments))

        found.extend(await steps(question, take))
    return found


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Return calls, median and 90th percentile."""
    return {"calls": len(milliseconds), "p50_ms": median(milliseconds), "p90_ms": quantiles(milliseconds, n=10)[-1]}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--index", required=True)
    parser.add_argument("--searches", type=int, default=50)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", action="store_true", dest="as_json")
    asked = parser.parse_args(arguments)
    questions = [task.query for task in open_source(asked.dataset).tasks("test")[: asked.searches]]
    asyncio.run(without(asked.index, questions[:3]))  # compiles what is compiled once
    direct = summary(asyncio.run(without(asked.index, questions)))
    words = [sys.executable, "-m", "harness1", "serve", "mcp", "--index", asked.index, "--http", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        try:
            asyncio.run(through_mcp(address.group(), questions[:3], 1))
            alone = summary(asyncio.run(through_mcp(address.group(), questions, 1)))
            together = summary(asyncio.run(through_mcp(address.group(), questions, asked.clients)))
        finally:
            process.terminate()
    report: dict[str, Any] = {"direct": direct, "one client": alone, f"{asked.clients} clients": together}
    report["ratio"] = alone["p50_ms"] / direct["p50_ms"]
    if asked.as_json:
        print(json.dumps(report))
    else:
        for name, found in report.items():
            said = f"{found:.2f}" if isinstance(found, float) else ", ".join(f"{k} {v:.1f}" for k, v in found.items())
            print(f"{name}: {said}")
    return report


if __name__ == "__main__":
    main()
