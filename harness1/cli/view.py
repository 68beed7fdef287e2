"""harness1 view: runs, trainings and recipes in one file of HTML."""

from __future__ import annotations

import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.status import Status
from typer import Argument, Option

from harness1.cli.options import Json
from harness1.cli.printing import print_json, put
from harness1.cli.terminal import Terminal
from harness1.errors import UsageError
from harness1.plain import counted


def view(
    folders: Annotated[
        list[Path],
        Argument(help="Folders of runs, trainings, recipes and of `serve proxy --record`.", metavar="RUN"),
    ],
    out: Annotated[Path, Option(help="The file to write.", metavar="FILE")] = Path("view.html"),
    max_mb: Annotated[
        float,
        Option(
            help="Maximum size of the file in megabytes; tasks with the lowest and the highest recall go in first.",
            min=1,
        ),
    ] = 60.0,
    episodes: Annotated[str, Option(help="Include only these episodes, by id.", metavar="ID,...")] = "",
    tasks: Annotated[str, Option(help="Include only the episodes of these tasks, by id.", metavar="ID,...")] = "",
    workers: Annotated[int, Option(help="Number of processes; 0: one for each core.", min=0)] = 0,
    serve: Annotated[
        bool, Option("--serve", help="Instead of a file, serve a page on this machine that follows work under way.")
    ] = False,
    port: Annotated[int, Option(help="Port of the page; 0 lets the system choose one.", min=0, max=65535)] = 0,
    open_it: Annotated[bool, Option("--open", help="Open the file or the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write runs into one self-contained HTML file: no server, no network. Every episode is replayed from its record;
    those that do not fit, or were not selected, stay in the list, with the command that shows them.

    Example: harness1 view runs/search runs/scripted --out view.html --open
    """
    if serve:
        if episodes or tasks or as_json:
            raise UsageError("--serve shows all episodes in a page: give it without --episodes, --tasks and --json")
        _serve(folders, port, open_it)
        return
    # Imported here, because the other verbs start sooner without it.
    from harness1.viewer.pages import Asked, write_view

    asked = Asked(folders, _names(episodes), _names(tasks), int(max_mb * 1e6), workers)
    with Status("replaying", console=Terminal(stderr=True)) as status:
        done = write_view(asked, out, lambda count: status.update(f"replaying: {count} episodes"))
    if as_json:
        print_json(asdict(done) | {"path": str(out)})
    else:
        put(f"{out}: {counted(done.episodes, 'episode')}, {done.size / 1e6:.1f} MB")
        if done.left_out:
            put(f"{done.left_out} are left out; the list shows them, and the command that holds them")
        if done.problems:
            put(f"{done.problems} cannot be replayed exactly; they say why")
    if open_it:
        webbrowser.open(out.resolve().as_uri())


def _serve(folders: list[Path], port: int, open_it: bool) -> None:
    from harness1.viewer.live import LiveServer, Watched, serve_view

    watched = Watched(folders)
    if problems := watched.news("", 0)["problems"]:
        raise UsageError(problems[0])
    server = LiveServer(watched, port)
    put(f"{counted(len(folders), 'folder')} at {server.address}: Ctrl-C ends it", flush=True)
    if open_it:
        webbrowser.open(server.address)
    serve_view(server)


def _names(words: str) -> tuple[str, ...]:
    return tuple(word for word in map(str.strip, words.split(",")) if word)
