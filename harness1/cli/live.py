"""Show an episode on the terminal, as it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, TypedDict

from rich.console import Console
from rich.markup import escape

from harness1.env.environment import SearchEnv, Step
from harness1.env.render.prose import sentence
from harness1.memory.history import subject
from harness1.records import Delta, Episode, Observation, UnitId

STYLES = {"very_high": "bold green", "high": "green", "fair": "yellow", "low": "dim"}
SHOWN_HITS = 5
SNIPPET_CHARACTERS = 200


class _OneLine(TypedDict):
    overflow: Literal["ellipsis"]
    no_wrap: bool


ONE_LINE: _OneLine = {"overflow": "ellipsis", "no_wrap": True}


@contextmanager
def watched(query: str, console: Console, env: SearchEnv) -> Iterator[Callable[[Step], None]]:
    """Print a question, and yield a function that prints each step of the episode that answers it."""
    console.print(f"[bold]{escape(query)}[/]\n")
    # Without a terminal, a spinner would leave an empty line behind.
    with console.status("the policy is at work") if console.is_terminal else nullcontext():
        yield watcher(env, console)


def watcher(env: SearchEnv, console: Console) -> Callable[[Step], None]:
    """Return a function that prints each step of an episode of this environment."""

    def show(step: Step) -> None:
        turn = step.turn
        if turn.action is None or turn.observation is None:
            return
        console.print(f"[bold cyan]turn {turn.index}[/] [bold]{turn.action.name}[/] {escape(subject(turn.action))}")
        if turn.reasoning:
            console.print(f"  [dim]{escape(turn.reasoning)}[/]")
        _show_answer(env, turn.observation, console)
        _show_delta(env, turn.observation.delta, console)
        if step.context is not None:
            budget = step.context.budget
            counts = f"curated {len(env.state.memory.curated)}/{env.config.curation.cap}"
            console.print(f"  [dim]{counts}, budget {budget.used}/{budget.limit} tokens[/]")

    return show


def _show_answer(env: SearchEnv, observation: Observation, console: Console) -> None:
    if observation.error is not None:
        console.print(f"  [red]{escape(sentence(observation.error))}[/]")
    for hit in observation.hits[:SHOWN_HITS]:
        unit_id = env.state.memory.pool.unit_of(hit)
        entry = env.state.memory.pool.entries.get(unit_id)
        label = entry.handle if entry else "copy"
        console.print(f"  [blue]{label:>5}[/] {escape(hit.title or hit.text[:60])}", **ONE_LINE)
    if len(observation.hits) > SHOWN_HITS:
        console.print(f"        [dim]and {len(observation.hits) - SHOWN_HITS} more[/]")
    for verdict in observation.verdicts:
        handle = env.state.memory.pool.entries[verdict.unit_id].handle
        console.print(
            f"  [blue]{handle:>5}[/] [bold]{verdict.label}[/] {escape(verdict.sentence[:SNIPPET_CHARACTERS])}"
        )


def _show_delta(env: SearchEnv, delta: Delta, console: Console) -> None:
    entries = env.state.memory.pool.entries
    tags = env.state.memory.curated.tags
    gained = {**dict.fromkeys(delta.auto_populated), **delta.added, **delta.retagged}
    words = [
        f"[{STYLES[tags[unit_id]]}]+{entries[unit_id].handle} {tags[unit_id]}[/]"
        for unit_id in gained
        if unit_id in tags
    ]
    words += [f"[red]-{entries[unit_id].handle}[/]" for unit_id in (*delta.removed, *delta.evicted)]
    if words:
        console.print("  " + " ".join(words))


def show_result(env: SearchEnv, episode: Episode, console: Console) -> None:
    """Print the delivered set, ranked, with a snippet of each document."""
    console.print(f"\n[bold]{len(episode.curated)} documents[/] [dim]({episode.stop_reason})[/]")
    for place in episode.curated:
        entry = env.state.memory.pool.entries[place.unit_id]
        name = escape(entry.title or str(place.unit_id))
        console.print(f"{place.rank:>3} [{STYLES[place.tag]}]{place.tag:<9}[/] [bold]{name}[/]", **ONE_LINE)
        console.print(f"              [dim]{escape(snippet(env, place.unit_id))}[/]", **ONE_LINE)
    if episode.error:
        console.print(f"[red]The episode is invalid: {escape(episode.error)}[/]")


def snippet(env: SearchEnv, unit_id: UnitId) -> str:
    """Return the beginning of a document's text, on one line."""
    return " ".join(env.state.memory.text_of(unit_id)[: 4 * SNIPPET_CHARACTERS].split())[:SNIPPET_CHARACTERS]
