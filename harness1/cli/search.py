"""harness1 search: one episode, live."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from harness1.cli.live import show_result, snippet, watcher
from harness1.cli.options import ConfigFile, Json, Overrides, PolicyName, resolve, say_torn
from harness1.config import Config
from harness1.env.environment import SearchEnv
from harness1.env.verifiers.open import open_verifier
from harness1.episodes.rollout import rollout
from harness1.errors import InfrastructureFault, UsageError
from harness1.hashing import digest
from harness1.policy.policy import counter_of
from harness1.policy.registry import needs_gold, open_policy
from harness1.records import Episode, Task
from harness1.retrieval.open import absolute_index, open_retriever
from harness1.reward.composite import score
from harness1.runs.folder import refuse_other_run, run_stage
from harness1.runs.store import EpisodeStore


def search(
    question: Annotated[str, typer.Argument(help="What to find the evidence for.")],
    index: Annotated[
        str, typer.Option("--index", help="Folder made by `harness1 index`, or the URI of an engine.", metavar="SPEC")
    ],
    policy: PolicyName = "scripted",
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder for the record; default runs/search-HASH.", metavar="RUN")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="For policies that draw.")] = 0,
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
    console = Console(stderr=as_json, quiet=as_json, highlight=False)
    settings = resolve(config, overrides)
    if settings.index != Config().index:
        raise UsageError("index settings take effect when an index is made: use them with `harness1 index`")
    task = Task(f"query-{digest(question)[:12]}", question, "search")
    episode, env, out = run_one(task, index, policy, settings, out, console, seed)
    if as_json:
        print(msgspec.json.encode(as_result(env, episode, out)).decode())
    else:
        show_result(env, episode, console)
        if failure := parse_failure(episode):
            console.print(f"[red]The policy gave no valid action: {escape(failure)}[/]")
        console.print(f"recorded in {escape(str(out))}", highlight=False)
    if episode.error:
        raise InfrastructureFault(episode.error)


def run_one(
    task: Task, index: str, policy: str, config: Config, out: Path | None, console: Console, seed: int = 0
) -> tuple[Episode, SearchEnv, Path]:
    """Run one episode, print its steps, score it where there is gold, and append it to a run folder.

    Without a folder, searches under the same configuration, policy and index share one.
    """
    verifier = open_verifier(config.env, config.machine)
    chosen = open_policy(policy, {}, config)
    env = SearchEnv(config.env, open_retriever(index, config), verifier, counter_of(chosen), config.machine)
    hashes = {"env": env.hash, "policy": chosen.hash, "index": env.retriever.info.index_hash}
    stage = run_stage(config, policy, hashes, absolute_index(index), hashes)
    out = out or Path("runs") / f"search-{digest(hashes)[:8]}"
    refuse_other_run(stage, out)
    console.print(f"[bold]{escape(task.query)}[/]\n")
    # Off a terminal, a spinner would leave an empty line behind.
    waiting = console.status("the policy is at work") if console.is_terminal else nullcontext()
    with EpisodeStore(out) as store:
        say_torn(out, store.torn)
        with waiting:
            episode = asyncio.run(rollout(env, chosen, task, seed=seed, on_step=watcher(env, console)))
        episode = score(episode, task.gold, config) if task.gold is not None else episode
        store.append(episode)
    stage.write(out, status="finished")
    return episode, env, out


def as_result(env: SearchEnv, episode: Episode, out: Path) -> dict[str, Any]:
    """The outcome of an episode for a program to read."""
    entries = env.state.memory.pool.entries
    curated = [
        {
            "rank": place.rank,
            "id": place.unit_id,
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
    """Why the last output of a policy held no action, where that ended the episode."""
    return episode.turns[-1].parse_error if episode.turns else None
