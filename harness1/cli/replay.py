"""harness1 replay: rebuild episodes from their records and compare every hash."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from harness1.cli.bars import tracked
from harness1.cli.options import Json
from harness1.cli.printing import print_result, put, say_torn
from harness1.config import Config
from harness1.episodes.rollout import ReplayReport, replay_episode, replay_live
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.fetch import resolve_model
from harness1.models.open import HARMONY, format_at
from harness1.plain import counted
from harness1.records import Episode, Status
from harness1.retrieval.open import open_retriever
from harness1.rl.logprobs import LogprobReport, compare_calls, grammar_masks, sampled_calls
from harness1.rows.calls import calls_of
from harness1.runs.files import Stage, read_stage
from harness1.runs.folder import run_config
from harness1.runs.journal import EPISODES, read_episodes, undigested_lines
from harness1.tools.registry import Toolbox


def replay(
    run: Annotated[Path, Argument(help="A run folder.", metavar="RUN")],
    live: Annotated[bool, Option("--live", help="Query the index again and compare its answers too.")] = False,
    index: Annotated[str | None, Option(help="The index to query; default: the run's own.")] = None,
    model: Annotated[
        str | None,
        Option(
            help="Also recompute the log probability of every sampled token, with one forward pass of this model.",
            metavar="PATH",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rebuild every episode from its record and check every state hash. Exit code 1 if anything differs.

    Example: harness1 replay runs/search --live
    """
    config, own_index = run_config(run)
    card = read_stage(run)
    assert card is not None, "run_config has read it"
    if "fused" in card.inputs:
        raise UsageError(f"{run} is fused of other runs and has no turns: replay those")
    folder = None if model is None else resolve_model(model)
    recorded = list(read_episodes(run, on_torn=partial(say_torn, run)))
    episodes = [episode for episode in recorded if episode.status is not Status.INFRA_ERROR]
    retriever = open_retriever(str(index or own_index), config) if live else None

    def one(episode: Episode) -> ReplayReport:
        if retriever is None:
            return replay_episode(episode, config.env)
        return asyncio.run(replay_live(episode, config.env, retriever, config.machine))

    reports = [one(episode) for episode in tracked(episodes, "replaying", len(episodes))]
    turns, equal = sum(report.turns for report in reports), sum(report.equal for report in reports)
    differences = [
        f"{episode.task.task_id}: {found}"
        for episode, report in zip(episodes, reports, strict=True)
        if (found := report.difference or _foreign(episode, card))
    ]
    gate = None
    if folder is not None:
        gate, complaint = _gate(episodes, folder, config)
        if complaint:
            differences.append(complaint)
    counts = {"episodes": len(episodes), "skipped": len(recorded) - len(episodes), "turns": turns, "equal": equal}
    counts["undigested"] = undigested_lines(run / EPISODES)
    summary = {**counts, "differences": differences, "logprobs": gate}
    print_result(summary, as_json, _print_replay)
    if differences:
        raise typer.Exit(1)


def _print_replay(summary: dict[str, Any]) -> None:
    put(f"{counted(summary['episodes'], 'episode')}, {summary['equal']} of {summary['turns']} turns equal")
    for line in _gate_lines(summary["logprobs"]) if summary["logprobs"] else ():
        put(line)
    if summary["skipped"]:
        put(f"{summary['skipped']} skipped: the infrastructure had failed")
    if summary["undigested"]:
        put(f"{summary['undigested']} recorded without digests, by an earlier version: some edits cannot be found")
    for difference in summary["differences"][:10]:
        put(f"  {difference}")


def _foreign(episode: Episode, card: Stage) -> str | None:
    """Return what an episode was made with other than its run, in words, or None."""
    inputs, hashes = card.inputs, episode.hashes
    made = {"env": hashes.env, "policy": hashes.policy, "index": hashes.index}
    wrong = [name for name, value in made.items() if inputs.get(name, value) != value]
    if episode.task.task_id not in inputs.get("tasks", (episode.task.task_id,)):
        wrong.append("task")
    return f"it is not of this run: another {', '.join(wrong)}" if wrong else None


def _gate(episodes: list[Episode], folder: Path, config: Config) -> tuple[LogprobReport | None, str | None]:
    """Compare all model calls with plain forward passes of a model; return the report, and the problem if any.

    Raises:
        UsageError: no call has log probabilities, or the model does not load.
    """
    sampled = [call for episode in episodes for call in calls_of(episode) if call.output_logprobs]
    if not sampled:
        raise UsageError("this run holds no sampled tokens with log probabilities: there is nothing to compute again")
    chat = format_at(HARMONY if config.machine.model.tokenizer == HARMONY else folder, config)
    if any(call.tokenizer_hash != chat.tokenizer.hash for call in sampled):
        return None, f"{folder} has another tokenizer than the model that was sampled from"
    model = load_causal_model(folder, config.machine.model.device or "cpu", config.policy.dtype)
    masks = None
    if config.policy.constrained:
        masks = grammar_masks(folder, model.config.vocab_size, [chat.grammar(Toolbox.of(config.env).specs)])
    calls = (call for episode in episodes for call in sampled_calls(episode))
    try:
        report = compare_calls(model, tracked(calls, "computing", len(sampled)), masks)
    except InfrastructureFault as fault:  # its grammar would not have allowed this output
        return None, str(fault)
    if report.passes(config.policy.dtype):
        return report, None
    return report, f"the recorded log probabilities are not those of {folder}"


def _gate_lines(gate: LogprobReport) -> Iterator[str]:
    if gate.tokens:
        yield (
            f"{gate.tokens} sampled tokens: log probabilities differ by at most {gate.max_difference:.2g}"
            f" ({gate.worst_ratio:.2f} of the bound), mean k3 {gate.mean_k3:.2g}"
        )
    if gate.greedy_tokens:
        yield f"{gate.greedy_tokens} tokens at temperature 0: at most {gate.greedy_gap:.2g} below the highest logit"
