"""harness1 search: one episode, live."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from harness1.cli.live import show_result, snippet, watched
from harness1.cli.options import ConfigFile, Json, Overrides, Tools, resolve
from harness1.cli.policies import PolicyName
from harness1.cli.printing import print_json, program, say_torn
from harness1.cli.terminal import Terminal
from harness1.config import Config
from harness1.data.indexing import Files, files_of
from harness1.env.environment import SearchEnv
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.single import asked, play_one
from harness1.errors import InfrastructureFault, UsageError
from harness1.policy.registry import needs_gold
from harness1.records import Episode, Status, StopReason


def search(
    question: Annotated[str, Argument(help="The question to find evidence for.", metavar="QUESTION")],
    index: Annotated[
        str,
        Option(
            "--index",
            "--retriever",
            help="Folder made by `harness1 index`, the URI of an engine, or a retriever as FILE.py:NAME.",
            metavar="SPEC",
        ),
    ],
    policy: PolicyName = "scripted",
    out: Annotated[
        Path | None, Option(help="Run folder for the record; default runs/search-HASH.", metavar="RUN")
    ] = None,
    seed: Annotated[int, Option(help="Seed of policies that sample.")] = 0,
    tools: Tools = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Run one search episode and show it as it happens.

    Example: harness1 search "Who founded the company that makes Velcro?" --index wiki.index
    """
    if not question.strip():
        raise UsageError("the question is empty")
    if needs_gold(policy):
        raise UsageError("the oracle needs gold: use it with `harness1 eval`")
    console = Terminal(stderr=as_json, quiet=as_json)
    settings = resolve(config, overrides, policy, tools=tools)
    if settings.index != Config().index:
        raise UsageError("index settings take effect when an index is made: use them with `harness1 index`")
    files, task = files_of(index), asked(question)
    setup, watch = EpisodeSetup(settings, index, policy), partial(watched, task.query, console)
    episode, env, out = play_one(task, setup, out, seed=seed, watch=watch, on_torn=say_torn)
    if as_json:
        print_json(as_result(env, episode, out, files))
    else:
        show_result(env, episode, console, files)
        if failure := parse_failure(episode):
            console.print(f"The policy gave no valid action: {failure}", style="red")
        if episode.stop_reason is StopReason.CONTEXT_OVERFLOW:
            console.print(f"The prompt is longer than the model's context: {episode.error}", style="red")
        if episode.status is not Status.INFRA_ERROR and not env.state.memory.pool.entries:
            console.print("No document was found: ask in words that the documents use.")
        console.print(f"recorded in {out}; to look at it: {program()} view {out}", soft_wrap=True)
    if episode.status is Status.INFRA_ERROR:
        raise InfrastructureFault(f"the episode is invalid: {episode.error}")


def as_result(env: SearchEnv, episode: Episode, out: Path, files: Files) -> dict[str, Any]:
    """Return the outcome of an episode for a program to read; the path of a document that is no file is null."""
    entries = env.state.memory.pool.entries
    paths = {place.unit_id: files(entries[place.unit_id].doc_id) for place in episode.curated}
    curated = [
        {
            "rank": place.rank,
            "id": place.unit_id,
            "path": str(path) if (path := paths[place.unit_id]) else None,
            "tag": place.tag,
            "title": entries[place.unit_id].title,
            "snippet": snippet(env, place.unit_id),
        }
        for place in episode.curated
    ]
    result = {
        "status": episode.status,
        "stop_reason": episode.stop_reason,
        "turns": len(episode.turns),
        "curated": curated,
        "episode_id": episode.episode_id,
        "run": str(out),
        "error": episode.error,
        "parse_error": parse_failure(episode),
    }
    if episode.reward is not None:
        result["reward"] = episode.reward.total
    return result


def parse_failure(episode: Episode) -> str | None:
    """Return why the last output of a policy held no action, if that ended the episode."""
    return episode.turns[-1].parse_error if episode.turns else None
