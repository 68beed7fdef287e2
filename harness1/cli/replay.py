"""harness1 replay: rebuild episodes from their records and compare every hash."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import track

from harness1.cli.options import Json, say_torn
from harness1.records import Episode, Status
from harness1.replay import ReplayReport, replay_episode, replay_live
from harness1.retrieval.engines import open_retriever
from harness1.run_folder import run_config
from harness1.store import read_episodes


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    live: Annotated[bool, typer.Option("--live", help="Ask the index again and compare its answers too.")] = False,
    index: Annotated[str | None, typer.Option("--index", help="The index to ask; default the run's own.")] = None,
    as_json: Json = False,
) -> None:
    """Rebuild every episode from its record and check every state hash. Exit code 1 if anything differs.

    Example: harness1 replay runs/search --live
    """
    config, own_index = run_config(run)
    recorded = list(read_episodes(run, on_torn=partial(say_torn, run)))
    episodes = [episode for episode in recorded if episode.status is not Status.INFRA_ERROR]
    skipped = len(recorded) - len(episodes)
    retriever = open_retriever(str(index or own_index), config) if live else None

    def one(episode: Episode) -> ReplayReport:
        if retriever is None:
            return replay_episode(episode, config.env)
        return asyncio.run(replay_live(episode, config.env, retriever, config.run))

    console = Console(stderr=True)
    reports = [one(episode) for episode in track(episodes, "replaying", console=console, transient=True)]
    turns, equal = sum(report.turns for report in reports), sum(report.equal for report in reports)
    differences = [
        f"{episode.task.task_id}: {report.difference}"
        for episode, report in zip(episodes, reports, strict=True)
        if report.difference
    ]
    if as_json:
        counts = {"episodes": len(episodes), "skipped": skipped, "turns": turns, "equal": equal}
        summary = {**counts, "differences": differences}
        print(msgspec.json.encode(summary).decode())
    else:
        print(f"{len(episodes)} episodes, {equal} of {turns} turns equal")
        if skipped:
            print(f"{skipped} skipped: the infrastructure had failed")
        for difference in differences[:10]:
            print(f"  {difference}")
    if differences:
        raise typer.Exit(1)
