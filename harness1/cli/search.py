"""harness1 index, search and demo: make a corpus searchable, and one episode, live."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.text import Text
from typer import Argument, Exit, Option

from harness1.cli.options import ConfigFile, Force, Json, Overrides, Tools, place_of, resolve
from harness1.cli.policies import PolicyName, open_setup
from harness1.cli.printing import print_json, program, put, say_torn
from harness1.cli.progress import Terminal, read_aloud
from harness1.config import Config
from harness1.data.indexing import (
    Files,
    add_to_index,
    copies_of,
    delete_from_index,
    ensure_index,
    files_of,
    left_out_of,
    reading_of,
)
from harness1.data.open import open_source
from harness1.data.source import Source, refuse
from harness1.env.environment import SearchEnv, Step
from harness1.env.pieces import sentence
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.single import play_one, question_task
from harness1.errors import InfrastructureFault, UsageError
from harness1.memory.confidence import NEAREST, UNCONVINCING, judge
from harness1.memory.parts import telling_argument
from harness1.plain import counted, printable
from harness1.records import Episode, Observation, Status, StopReason, ToolCall, UnitId
from harness1.retrieval.files import check_index
from harness1.runs.folder import clear_run
from harness1.tools.discovery import show_title
from harness1.tools.tool import one_line
from harness1.words import AUTO, NONE


def search(
    question: Annotated[str, Argument(help="The question to find evidence for.", metavar="QUESTION")],
    index: Annotated[str, Option("--index", "--retriever", help="An index, engine or FILE.py:NAME.", metavar="SPEC")],
    policy: PolicyName = "scripted",
    out: Annotated[Path | None, Option(help="Run folder; default runs/search-HASH.", metavar="RUN")] = None,
    seed: Annotated[int, Option(help="Seed of policies that sample.")] = 0,
    tools: Tools = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Run one search episode and show it as it happens.

    Example: harness1 search "Who founded the company that makes Velcro?" --index wiki.index"""
    setup = open_setup(question, index, policy, resolve(config, overrides, policy, tools=tools))
    console, task = Terminal(stderr=as_json, quiet=as_json), question_task(question)
    files, copies, watch = files_of(index), copies_of(index), partial(watch_episode, task.query, console)
    episode, env, out = play_one(task, setup, out, seed=seed, watch=watch, on_torn=say_torn)
    failure = episode.turns[-1].parse_error if episode.turns else None
    if as_json:
        found = as_result(env, episode, out, files, copies)
        print_json(found | {"parse_error": failure, "last_output": last_words(episode)})
    else:
        show_result(env, episode, console, files, copies)
        if episode.stop_reason is StopReason.CONTEXT_OVERFLOW:
            console.print(f"The prompt is longer than the model's context: {episode.error}", style="red")
        asked = any(turn.action and env.toolbox.traits(turn.action.name).discovers for turn in episode.turns)
        if asked and episode.status is not Status.INFRA_ERROR and not env.state.memory.pool.entries:
            console.print("No document was found: ask in words that the documents use.")
        console.print(f"recorded in {out}; to look at it: {program()} view {out}", soft_wrap=True)
        if failure:
            tried = counted(max(1, len(episode.turns[-1].calls)), "attempt")
            console.print(f"The policy gave no valid action in {tried}: {failure}", style="red")
            if last := last_words(episode):
                _show_text(Text(f"Its last output: {last}", "red"), console)
    if episode.status is Status.INFRA_ERROR:
        raise InfrastructureFault(f"the episode is invalid: {episode.error}")
    if episode.stop_reason is StopReason.FORMAT_LIMIT:
        raise Exit(1)


Copies = Mapping[str, list[str]]  # names of further files with the text of a document, by its id


def as_result(
    env: SearchEnv, episode: Episode, out: Path, files: Files, copies: Copies = MappingProxyType({})
) -> dict[str, Any]:
    """Return the outcome of an episode for a program to read; the path of a document that is no file is null."""
    entries, judgement = env.state.memory.pool.entries, judge(env.state.memory, episode.curated)
    curated = [
        {
            "rank": place.rank,
            "id": place.unit_id,
            "path": str(path) if (path := files(entries[place.unit_id].doc_id)) else None,
            "copies": copies.get(entries[place.unit_id].doc_id, []),
            "tag": place.tag,
            "confidence": round(judgement.confidence[place.unit_id], 3),
            "title": entries[place.unit_id].title,
            "snippet": snippet(env, place.unit_id),
        }
        for place in episode.curated
    ]
    result: dict[str, Any] = {
        "status": episode.status,
        "stop_reason": episode.stop_reason,
        "turns": len(episode.turns),
        "convincing": judgement.convincing,
        "message": None if judgement.convincing else f"{UNCONVINCING}.",
        "curated": curated,
        "episode_id": episode.episode_id,
        "run": str(out),
        "error": episode.error,
    }
    return result | ({} if episode.reward is None else {"reward": episode.reward.total})


def last_words(episode: Episode) -> str | None:
    """Return the last output of a policy, on a line, if that held no action and is known as a text."""
    turn = episode.turns[-1] if episode.turns and episode.turns[-1].parse_error else None
    said = "" if turn is None else (turn.calls[-1].text if turn.calls else "") or turn.reasoning
    return shorten(printable(said), ABOUT_CHARACTERS, placeholder=" ...") or None


STYLES = {"very_high": "bold green", "high": "green", "fair": "yellow", "low": "dim"}
HANDLE = "magenta"  # legible on black and on white
SHOWN_HITS, ABOUT_CHARACTERS, SNIPPET_CHARACTERS = 5, 300, 200
AGAIN = "again, for further hits"


@contextmanager
def watch_episode(query: str, console: Console, env: SearchEnv) -> Iterator[Callable[[Step], None]]:
    """Print a question, and yield a function that prints each step of the episode that answers it."""
    console.print(f"{query}\n", style="bold")
    if not console.is_terminal:  # there, a spinner would leave an empty line behind
        yield Watcher(env, console)
        return
    with console.status("at work; the first time, the search is compiled"):
        yield Watcher(env, console)


class Watcher:
    """Prints each step of an episode; a call that repeats the one before is named by that, and a reason said once."""

    def __init__(self, env: SearchEnv, console: Console) -> None:
        self._env, self._console = env, console
        self._action: ToolCall | None = None
        self._reason = ""

    def __call__(self, step: Step) -> None:
        """Print a step; one without an action is left out."""
        turn, env, console = step.turn, self._env, self._console
        if turn.action is None or turn.observation is None:
            return
        about = AGAIN
        if turn.action != self._action:
            value = telling_argument(turn.action)
            told = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
            about = shorten(told, ABOUT_CHARACTERS, placeholder=" ...")
        name = one_line(turn.action.name), "bold"
        _show_text(Text.assemble((f"turn {turn.index}", "bold cyan"), " ", name, f" {about}"), console)
        if turn.reasoning and turn.reasoning != self._reason:
            _show_text(Text(f"  {turn.reasoning}", "dim"), console)
        self._action, self._reason = turn.action, turn.reasoning
        _show_answer(env, turn.observation, console)
        if step.context is not None:
            budget = step.context.budget
            counts = f"curated {len(env.state.memory.curated)}/{env.config.curation.cap}"
            console.print(f"  {counts}, budget {budget.used}/{budget.limit} tokens", style="dim")


def _show_answer(env: SearchEnv, observation: Observation, console: Console) -> None:
    entries, tags, delta = env.state.memory.pool.entries, env.state.memory.curated.tags, observation.delta
    if observation.error is not None:
        _show_text(Text(f"  {sentence(observation.error)}", "red"), console)
    for hit in observation.hits[:SHOWN_HITS]:
        entry = entries.get(env.state.memory.pool.unit_of(hit))
        label = entry.handle if entry else "copy"
        name = show_title(hit.title or hit.text[:60], env.config)
        _show_text(Text.assemble((f"  {label:>5}", HANDLE), f" {name}"), console, cut=True)
    if len(observation.hits) > SHOWN_HITS:
        console.print(f"        and {len(observation.hits) - SHOWN_HITS} more", style="dim")
    for verdict in observation.verdicts:
        handle = entries[verdict.unit_id].handle
        passage = f" {verdict.sentence[:SNIPPET_CHARACTERS]}"
        _show_text(Text.assemble((f"  {handle:>5}", HANDLE), " ", (verdict.label, "bold"), passage), console)
    gained = [unit for unit in {**dict.fromkeys(delta.auto_populated), **delta.added, **delta.retagged} if unit in tags]
    words = [Text(f"+{entries[unit_id].handle} {tags[unit_id]}", STYLES[tags[unit_id]]) for unit_id in gained]
    words += [Text(f"-{entries[unit_id].handle}", "red") for unit_id in (*delta.removed, *delta.evicted)]
    if words:
        _show_text(Text("  ").append_text(Text(" ").join(words)), console)


def show_result(
    env: SearchEnv, episode: Episode, console: Console, files: Files, copies: Copies = MappingProxyType({})
) -> None:
    """Print the delivered documents, each path or id whole on its line; if none convinces, that and the nearest."""
    number, shown = f"\n{counted(len(episode.curated), 'document')}", episode.curated
    if shown and not judge(env.state.memory, shown).convincing:
        number, shown = f"\n{UNCONVINCING}; the nearest of {counted(len(shown), 'document')}:", shown[:NEAREST]
    console.print(Text.assemble((number, "bold"), " ", (f"({episode.stop_reason})", "dim")))
    for place in shown:
        entry = env.state.memory.pool.entries[place.unit_id]
        file = files(entry.doc_id)
        console.print(str(file or place.unit_id), style="bold", soft_wrap=True)
        if others := copies.get(entry.doc_id):
            console.print(f"    also {printable(', '.join(others))}", style="dim", soft_wrap=True)
        chunk = f"  {place.unit_id}" if file and episode.unit == "chunk" else ""
        rank, tag = f"{place.rank:>3} ", (f"{place.tag:<9}", STYLES[place.tag])
        title = show_title(entry.title, env.config)
        _show_text(Text.assemble(rank, tag, f" {title}", (chunk, "dim")), console, cut=True)
        _show_text(Text(f"              {snippet(env, place.unit_id)}", "dim"), console, cut=True)


def _show_text(text: Text, console: Console, *, cut: bool = False) -> None:
    """Print a text: on a terminal wrapped between words, or cut at its width; on one line in a pipe or a file."""
    if cut and console.is_terminal:
        console.print(text, overflow="ellipsis", no_wrap=True)
    else:
        console.print(text, soft_wrap=not console.is_terminal)


def snippet(env: SearchEnv, unit_id: UnitId) -> str:
    """Return the beginning of a document's text, on one line."""
    return " ".join(env.state.memory.text_of(unit_id)[: 4 * SNIPPET_CHARACTERS].split())[:SNIPPET_CHARACTERS]


def demo(
    out: Annotated[Path, Option(help="Folder for the index and the record.", metavar="DIR")] = Path("runs/demo"),
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Index the standard library's documentation and search it with the scripted policy, live.

    Example: harness1 demo"""
    settings = resolve(config, overrides)
    source = open_source("stdlib")
    console = Terminal()
    info = ensure_index(source, out / "index", settings, read=read_aloud)
    console.print(f"{info.documents} documents of the standard library, index {info.index_hash[:12]}")
    task = source.tasks("demo")[0]
    clear_run(out / "run")
    setup = EpisodeSetup(settings, str(out / "index"), "scripted")
    watch = partial(watch_episode, task.query, console)
    episode, env, run = play_one(task, setup, out / "run", dataset="stdlib", watch=watch, on_torn=say_torn)
    show_result(env, episode, console, lambda _: None)
    if episode.error:
        raise InfrastructureFault(f"the episode is invalid: {episode.error}")
    needed = task.gold.relevant if task.gold else {}
    found = len({str(place.unit_id) for place in episode.curated} & needed.keys())
    console.print(f"\nThe question needs {', '.join(needed)}: {found} of {len(needed)} were found.")
    console.print(f"Recorded in {run}. Look at it, or check it:", soft_wrap=True)
    console.print(f"    {program()} view {run}\n    {program()} replay {run} --live", soft_wrap=True)


READ = {AUTO: "", NONE: "; not stemmed"}  # how words were read, where it is not by their script


def index(
    source: Annotated[
        str | None, Argument(help="A name, BEIR or TREC folder, NAME:PATH, JSONL, texts, world:SIZE or stdlib.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the index.", metavar="DIR")] = None,
    add: Annotated[bool, Option("--add", help="Add to the index; a document replaces the one with its id.")] = False,
    delete: Annotated[list[str] | None, Option(help="Remove this document; repeatable.", metavar="ID")] = None,
    strict: Annotated[bool, Option("--strict", help="Refuse a corpus that has a broken document.")] = False,
    follow_links: Annotated[bool, Option("--follow-links", help="Read links that lead out of the folder.")] = False,
    everything: Annotated[bool, Option("--all", help="Read hidden, ignored and built files too.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Index a corpus: a folder of files of any kind, one file, a BEIR folder (plain or .gz), a JSONL file, world:SIZE
    or stdlib.

    Example: harness1 index ~/notes --out notes.index; harness1 index check notes.index"""
    settings = resolve(config, overrides)

    def open_spec(spec: str | None) -> Source:
        if spec is None:
            raise UsageError("say what to index: a folder, a JSONL file, world:SIZE or stdlib")
        given: dict[str, bool] = {"leave_out": not strict, "follow_links": follow_links, "everything": everything}
        return open_source(place_of(spec, settings), refuse, **given)

    if out is None:
        raise UsageError("say where the index goes: --out DIR")
    if (add or delete) and (force or settings.index != Config().index):
        raise UsageError("an index is changed with the settings that it was built with: leave index.* and --force out")
    if delete and (source is not None or add):
        raise UsageError("--delete takes ids alone: no source and no --add")
    if delete:
        info = delete_from_index(delete, out, settings)
    elif add:
        info = add_to_index(open_spec(source), out, settings, read_aloud)
    else:
        info = ensure_index(open_spec(source), out, settings, force=force, whole=strict, read=read_aloud)
    left_out, reading = left_out_of(out), reading_of(out)
    if as_json:
        print_json(msgspec.to_builtins(info) | {"left_out": left_out} | reading)
    else:
        read = READ.get(info.language, f"; stemmed as {info.language}")
        lost = f"; {left_out} left out" if left_out else ""
        lost += f"; {counted(unread, 'file')} not read" if (unread := sum(reading.get("unread", {}).values())) else ""
        size = f"{counted(info.documents, 'document')}, {counted(info.chunks, 'chunk')}"
        put(f"{out}: {size}, index {info.index_hash[:12]}{read}{lost}")


def check(folder: Annotated[Path, Argument(help="The index.", metavar="DIR")], as_json: Json = False) -> None:
    """Read a whole index and compare every file with its checksum: exit code 2 if one differs.

    Example: harness1 index check notes.index"""
    found = check_index(folder)
    if as_json:
        print_json(found)
    elif found.damaged:
        put("\n".join(f"{damage.file}: {damage.reason}" for damage in found.damaged))
        put(f"{folder} is damaged: build it again with harness1 index --force")
    else:
        put(f"{folder}: {found.files} files, {found.bytes / 1e6:,.1f} MB, all as they were written")
    if found.damaged:
        raise Exit(2)
