"""An episode on the terminal: whole words, legible handles, and nothing said twice."""

from __future__ import annotations

import io

from rich.console import Console

from harness1.cli.search import AGAIN, Watcher
from harness1.episodes.rollout import rollout
from harness1.records import Task, ToolCall
from tests.support import END, Script, chunk, make_env, run, search

LONG = "Which of the " + "extraordinarily " * 30 + "old castles stands on the river?"


def shown(*actions: ToolCall) -> str:
    file = io.StringIO()
    console = Console(file=file, width=2000, highlight=False, markup=False)
    chunks = [chunk(f"d{at}", f"A castle on the river {at}.", f"Castle {at}") for at in range(30)]
    env = make_env(None, chunks)
    run(rollout(env, Script(*actions), Task("t", "Which castle?", "test"), on_step=Watcher(env, console)))
    return file.getvalue()


def test_a_long_query_is_cut_between_words() -> None:
    line = next(line for line in shown(search(LONG), END).splitlines() if line.startswith("turn 1"))
    assert line.endswith(" extraordinarily ...")
    assert len(line) < len(LONG)


def test_a_repeated_call_and_its_reason_are_not_repeated() -> None:
    lines = shown(search("castle river"), search("castle river"), search("castle"), END).splitlines()
    turns = [line.split(" ", 3)[3] for line in lines if line.startswith("turn")]
    assert turns[:3] == ["castle river", AGAIN, "castle"]
