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
from harness1.config import Config
from harness1.models.fetch import resolve_model
from harness1.policy.causal_model import load_causal_model
from harness1.policy.formats.registry import open_format
from harness1.policy.tokenizer import open_tokenizer
from harness1.records import Episode, Status
from harness1.replay import ReplayReport, replay_episode, replay_live
from harness1.retrieval.engines import open_retriever
from harness1.rl.episode_calls import sampled_calls
from harness1.rl.grammar_masks import grammar_masks
from harness1.rl.logprobs import GateReport, compare_calls
from harness1.run_folder import run_config
from harness1.store import read_episodes
from harness1.tools.registry import Toolbox


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    live: Annotated[bool, typer.Option("--live", help="Ask the index again and compare its answers too.")] = False,
    index: Annotated[str | None, typer.Option("--index", help="The index to ask; default the run's own.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Also compute the log probability of every sampled token again, by one forward pass of this model.",
            metavar="PATH",
        ),
    ] = None,
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
    gate = None if model is None else _gate(episodes, resolve_model(model), config, console)
    if gate is not None and not gate.passes(config.policy.dtype):
        differences.append("the recorded log probabilities are not those of this model")
    if as_json:
        counts = {"episodes": len(episodes), "skipped": skipped, "turns": turns, "equal": equal}
        summary = {**counts, "differences": differences, "logprobs": gate}
        print(msgspec.json.encode(summary).decode())
    else:
        print(f"{len(episodes)} episodes, {equal} of {turns} turns equal")
        if gate is not None:
            print(
                f"{gate.tokens} sampled tokens: log probabilities differ by at most {gate.max_difference:.2g}"
                f" ({gate.worst_ratio:.2f} of the bound), mean k3 {gate.mean_k3:.2g}"
            )
        if skipped:
            print(f"{skipped} skipped: the infrastructure had failed")
        for difference in differences[:10]:
            print(f"  {difference}")
    if differences:
        raise typer.Exit(1)


def _gate(episodes: list[Episode], folder: Path, config: Config, console: Console) -> GateReport:
    """Compare all model calls with plain forward passes of a model."""
    model = load_causal_model(folder, config.run.model.device or "cpu", config.policy.dtype)
    chat = open_format(config.policy.format, open_tokenizer(folder))
    masks = None
    if config.policy.constrained:
        masks = grammar_masks(folder, model.config.vocab_size, [chat.grammar(Toolbox.of(config.env).specs)])
    calls = [call for episode in episodes for call in sampled_calls(episode)]
    return compare_calls(model, track(calls, "computing", console=console, transient=True), masks)
