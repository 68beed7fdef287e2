"""harness1 demo: a real episode over text that every machine has, the documentation of Python's standard library."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from harness1.cli.bars import read_aloud
from harness1.cli.live import show_result, watched
from harness1.cli.options import ConfigFile, Overrides, resolve
from harness1.cli.printing import program, say_torn
from harness1.cli.terminal import Terminal
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.single import play_one
from harness1.errors import InfrastructureFault
from harness1.runs.folder import clear_run


def demo(
    out: Annotated[Path, Option(help="Folder for the index and the record.", metavar="DIR")] = Path("runs/demo"),
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Index the standard library's documentation and search it with the scripted policy, live.

    Example: harness1 demo
    """
    settings = resolve(config, overrides)
    source = open_source("stdlib")
    console = Terminal()
    info = ensure_index(source, out / "index", settings, read=read_aloud)
    console.print(f"{info.documents} documents of the standard library, index {info.index_hash[:12]}")
    task = source.tasks("demo")[0]
    clear_run(out / "run")
    setup = EpisodeSetup(settings, str(out / "index"), "scripted")
    watch = partial(watched, task.query, console)
    episode, env, run = play_one(task, setup, out / "run", dataset="stdlib", watch=watch, on_torn=say_torn)
    show_result(env, episode, console, lambda _: None)
    if episode.error:
        raise InfrastructureFault(f"the episode is invalid: {episode.error}")
    needed = task.gold.relevant if task.gold else {}
    held = {str(place.unit_id) for place in episode.curated}
    found = [doc_id for doc_id in needed if doc_id in held]
    console.print(f"\nThe question needs {', '.join(needed)}: {len(found)} of {len(needed)} were found.")
    console.print(f"Recorded in {run}. Look at it, or check it:", soft_wrap=True)
    console.print(f"    {program()} view {run}\n    {program()} replay {run} --live", soft_wrap=True)
