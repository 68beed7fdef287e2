"""Show an episode on the terminal, as it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Literal, TypedDict

from rich.console import Console
from rich.text import Text

from harness1.data.indexing import Files
from harness1.env.environment import SearchEnv, Step
from harness1.env.pieces import sentence
from harness1.memory.parts import telling_argument
from harness1.plain import counted
from harness1.records import Delta, Episode, Observation, ToolCall, UnitId
from harness1.tools.discovery import shown_title
from harness1.tools.tool import one_line

STYLES = {"very_high": "bold green", "high": "green", "fair": "yellow", "low": "dim"}
HANDLE = "magenta"
"""Legible on black and on white."""
SHOWN_HITS = 5
ABOUT_CHARACTERS = 300
AGAIN = "again, for further hits"
SNIPPET_CHARACTERS = 200


class _OneLine(TypedDict):
    overflow: Literal["ellipsis"]
    no_wrap: bool


ONE_LINE: _OneLine = {"overflow": "ellipsis", "no_wrap": True}


@contextmanager
def watched(query: str, console: Console, env: SearchEnv) -> Iterator[Callable[[Step], None]]:
    """Print a question, and yield a function that prints each step of the episode that answers it."""
    console.print(f"{query}\n", style="bold")
    show = Watcher(env, console)
    if not console.is_terminal:  # there, a spinner would leave an empty line behind
        yield show
        return
    with console.status("at work; the first time, the search is compiled") as status:

        def told(step: Step) -> None:
            status.update("the policy is at work")
            show(step)

        yield told


class Watcher:
    """Prints each step of an episode of an environment. A call that repeats the one before, which pages through its
    hits, is named by that, and a reason is printed once."""

    def __init__(self, env: SearchEnv, console: Console) -> None:
        self._env, self._console = env, console
        self._action: ToolCall | None = None
        self._reason = ""

    def __call__(self, step: Step) -> None:
        """Print a step; one without an action is left out."""
        turn, env, console = step.turn, self._env, self._console
        if turn.action is None or turn.observation is None:
            return
        about = AGAIN if turn.action == self._action else _about(turn.action)
        name = one_line(turn.action.name), "bold"
        _show_text(Text.assemble((f"turn {turn.index}", "bold cyan"), " ", name, f" {about}"), console)
        if turn.reasoning and turn.reasoning != self._reason:
            _show_text(Text(f"  {turn.reasoning}", "dim"), console)
        self._action, self._reason = turn.action, turn.reasoning
        _show_answer(env, turn.observation, console)
        _show_delta(env, turn.observation.delta, console)
        if step.context is not None:
            budget = step.context.budget
            counts = f"curated {len(env.state.memory.curated)}/{env.config.curation.cap}"
            console.print(f"  {counts}, budget {budget.used}/{budget.limit} tokens", style="dim")


def _about(call: ToolCall) -> str:
    """Return the argument that says what a call is about, cut between words if it is long."""
    value = telling_argument(call)
    text = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    return shorten(text, ABOUT_CHARACTERS, placeholder=" ...")


def _show_answer(env: SearchEnv, observation: Observation, console: Console) -> None:
    if observation.error is not None:
        _show_text(Text(f"  {sentence(observation.error)}", "red"), console)
    for hit in observation.hits[:SHOWN_HITS]:
        unit_id = env.state.memory.pool.unit_of(hit)
        entry = env.state.memory.pool.entries.get(unit_id)
        label = entry.handle if entry else "copy"
        name = shown_title(hit.title or hit.text[:60], env.config)
        _show_line(Text.assemble((f"  {label:>5}", HANDLE), f" {name}"), console)
    if len(observation.hits) > SHOWN_HITS:
        console.print(f"        and {len(observation.hits) - SHOWN_HITS} more", style="dim")
    for verdict in observation.verdicts:
        handle = env.state.memory.pool.entries[verdict.unit_id].handle
        passage = f" {verdict.sentence[:SNIPPET_CHARACTERS]}"
        _show_text(Text.assemble((f"  {handle:>5}", HANDLE), " ", (verdict.label, "bold"), passage), console)


def _show_delta(env: SearchEnv, delta: Delta, console: Console) -> None:
    entries = env.state.memory.pool.entries
    tags = env.state.memory.curated.tags
    gained = {**dict.fromkeys(delta.auto_populated), **delta.added, **delta.retagged}
    words = [
        Text(f"+{entries[unit_id].handle} {tags[unit_id]}", STYLES[tags[unit_id]])
        for unit_id in gained
        if unit_id in tags
    ]
    words += [Text(f"-{entries[unit_id].handle}", "red") for unit_id in (*delta.removed, *delta.evicted)]
    if words:
        _show_text(Text("  ").append_text(Text(" ").join(words)), console)


def show_result(env: SearchEnv, episode: Episode, console: Console, files: Files) -> None:
    """Print the delivered set, ranked: of each document the whole path, or else its id, on a line of its own that is
    never cut; below it the tag, the title and a snippet, which a terminal cuts at its width."""
    number = f"\n{counted(len(episode.curated), 'document')}", "bold"
    console.print(Text.assemble(number, " ", (f"({episode.stop_reason})", "dim")))
    for place in episode.curated:
        entry = env.state.memory.pool.entries[place.unit_id]
        file = files(entry.doc_id)
        console.print(str(file or place.unit_id), style="bold", soft_wrap=True)
        chunk = f"  {place.unit_id}" if file and episode.unit == "chunk" else ""
        rank, tag = f"{place.rank:>3} ", (f"{place.tag:<9}", STYLES[place.tag])
        title = shown_title(entry.title, env.config)
        _show_line(Text.assemble(rank, tag, f" {title}", (chunk, "dim")), console)
        _show_line(Text(f"              {snippet(env, place.unit_id)}", "dim"), console)


def _show_text(text: Text, console: Console) -> None:
    """Print a text: wrapped between words on a terminal, on one line in a pipe or a file."""
    console.print(text, soft_wrap=not console.is_terminal)


def _show_line(text: Text, console: Console) -> None:
    """Print one line: cut at the width of a terminal, whole in a pipe or a file."""
    if console.is_terminal:
        console.print(text, **ONE_LINE)
    else:
        _show_text(text, console)


def snippet(env: SearchEnv, unit_id: UnitId) -> str:
    """Return the beginning of a document's text, on one line."""
    return " ".join(env.state.memory.text_of(unit_id)[: 4 * SNIPPET_CHARACTERS].split())[:SNIPPET_CHARACTERS]
