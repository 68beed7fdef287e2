"""harness1 compare, replay and view: what recorded runs say."""

from __future__ import annotations

import asyncio
import webbrowser
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import status
from typer import Argument, Option

from harness1.cli.options import Json, MovedDataset
from harness1.cli.printing import print_json, print_result, put, say, say_torn
from harness1.cli.progress import Terminal, track_items
from harness1.config import Config
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.plain import counted
from harness1.records import Episode, Status
from harness1.rows.calls import calls_of
from harness1.runs.files import Stage, read_stage, write_atomically
from harness1.runs.folder import lost_settings, refuse_lost_settings, run_config
from harness1.runs.journal import EPISODES, count_undigested, read_episodes

if TYPE_CHECKING:  # each verb imports what it alone needs, so that the others start sooner
    from harness1.episodes.rollout import ReplayReport
    from harness1.rl.logprobs import LogprobReport


def compare(
    runs: Annotated[list[Path], Argument(help="Run folders; each is compared with the first.", metavar="RUN")],
    metric: Annotated[str, Option(help="The metric by which tasks are won and lost.")] = "curated_recall",
    top: Annotated[int, Option(help="How many of the most changed tasks to show.", min=0)] = 10,
    equal_size: Annotated[bool, Option("--equal-size", help="Cut both sets to the smaller size, by task.")] = False,
    dataset: MovedDataset = None,
    out: Annotated[Path | None, Option(help="Also write it as Markdown.", metavar="FILE.md")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs on the same tasks: paired differences with intervals and significance, and what changed most.

    Differences are a run's value minus the first's. With more than two runs, p-values are corrected for their number.

    Example: harness1 compare runs/bm25 runs/scripted"""
    from harness1.cli.playing import print_comparison
    from harness1.eval.compare import blocks, markdown
    from harness1.eval.compare import compare as compare_runs
    from harness1.eval.run import read_run

    _say_lost(runs)
    comparison = compare_runs([read_run(run, dataset) for run in runs], metric, top, equal_size)
    if out is not None:
        try:
            write_atomically(out, markdown(blocks(comparison)).encode("utf-8", "replace"))
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror}") from error
    print_comparison(comparison, runs, as_json=as_json)


def _say_lost(runs: list[Path]) -> None:
    for run in runs:
        if found := lost_settings(run):
            say(f"{run} was recorded with {found}; what is shown of it is read without")


def replay(
    run: Annotated[Path, Argument(help="A run folder.", metavar="RUN")],
    live: Annotated[bool, Option("--live", help="Query the index again and compare its answers too.")] = False,
    index: Annotated[str | None, Option(help="The index to query; default: the run's own.")] = None,
    model: Annotated[
        str | None, Option(help="Also recompute the log probabilities of its tokens with this model.", metavar="PATH")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rebuild every episode from its record and check every state hash. Exit code 1 if anything differs.

    Example: harness1 replay runs/search --live"""
    from harness1.episodes.rollout import replay_episode, replay_live
    from harness1.models.fetch import resolve_model
    from harness1.retrieval.open import open_retriever

    config, own_index = run_config(run)
    refuse_lost_settings(run)
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

    reports = [one(episode) for episode in track_items(episodes, "replaying", len(episodes))]
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
    counts["undigested"] = count_undigested(run / EPISODES)
    summary = {**counts, "differences": differences, "logprobs": gate}
    print_result(summary, as_json, _print_replay)
    if differences:
        raise typer.Exit(1)


def _print_replay(summary: dict[str, Any]) -> None:
    put(f"{counted(summary['episodes'], 'episode')}, {summary['equal']} of {summary['turns']} turns equal")
    gate: LogprobReport | None = summary["logprobs"]
    if gate and gate.tokens:
        put(
            f"{gate.tokens} sampled tokens: log probabilities differ by at most {gate.max_difference:.2g}"
            f" ({gate.worst_ratio:.2f} of the bound), mean k3 {gate.mean_k3:.2g}"
        )
    if gate and gate.greedy_tokens:
        put(f"{gate.greedy_tokens} tokens at temperature 0: at most {gate.greedy_gap:.2g} below the highest logit")
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
    """Compare all model calls with forward passes of a model; return the report, and the problem if there is one."""
    from harness1.models.causal_model import load_causal_model
    from harness1.models.open import HARMONY, format_at
    from harness1.rl.logprobs import calls_to_replay, compare_calls, grammar_masks
    from harness1.tools.registry import Toolbox

    sampled = [call for episode in episodes for call in calls_of(episode) if call.output_logprobs]
    if not sampled:
        raise UsageError("this run holds no sampled tokens with log probabilities: there is nothing to compute again")
    chat = format_at(HARMONY if config.machine.model.tokenizer == HARMONY else folder, config)
    if any(call.tokenizer_hash != chat.tokenizer.hash for call in sampled):
        return None, f"{folder} has another tokenizer than the model that was sampled from"
    model = load_causal_model(folder, config.machine.device or "cpu", config.policy.dtype)
    masks = None
    if config.policy.constrained:
        masks = grammar_masks(folder, model.config.vocab_size, [chat.grammar(Toolbox.of(config.env).specs)])
    calls = (call for episode in episodes for call in calls_to_replay(episode))
    try:
        report = compare_calls(model, track_items(calls, "computing", len(sampled)), masks)
    except InfrastructureFault as fault:  # its grammar would not have allowed this output
        return None, str(fault)
    wrong = f"the recorded log probabilities are not those of {folder}"
    return report, None if report.passes(config.policy.dtype) else wrong


def view(
    folders: Annotated[list[Path], Argument(help="Runs, trainings, recipes and recorded calls.", metavar="RUN")],
    out: Annotated[Path, Option(help="The file to write.", metavar="FILE")] = Path("view.html"),
    max_mb: Annotated[
        float, Option(help="Maximum size of the file in megabytes; the worst and the best tasks go in first.", min=1)
    ] = 60.0,
    episodes: Annotated[str, Option(help="Include only these episodes, by id.", metavar="ID,...")] = "",
    tasks: Annotated[str, Option(help="Include only the episodes of these tasks, by id.", metavar="ID,...")] = "",
    serve: Annotated[bool, Option("--serve", help="Instead of a file, serve a page that follows the work.")] = False,
    port: Annotated[int, Option(help="Port of the page; 0 lets the system choose one.", min=0, max=65535)] = 0,
    open_it: Annotated[bool, Option("--open", help="Open the file or the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write runs into one self-contained HTML file: no server, no network. Every episode is replayed from its record;
    those that do not fit, or were not selected, stay in the list, with the command that shows them.

    Example: harness1 view runs/search runs/scripted --out view.html --open"""
    if serve:
        if episodes or tasks or as_json:
            raise UsageError("--serve shows all episodes in a page: give it without --episodes, --tasks and --json")
        _serve(folders, port, open_it)
        return
    _say_lost(folders)
    # Imported here, because the other verbs start sooner without it.
    from harness1.viewer.pages import write_view

    with status.Status("replaying", console=Terminal(stderr=True)) as shown:
        done = write_view(
            folders,
            out,
            lambda count: shown.update(f"replaying: {count} episodes"),
            episodes=list(filter(None, map(str.strip, episodes.split(",")))),
            tasks=list(filter(None, map(str.strip, tasks.split(",")))),
            max_bytes=int(max_mb * 1e6),
        )
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
    with optional("serve"):
        from harness1.serve.server import serve
        from harness1.serve.view import HOST, LIMITS, view_app
    from harness1.viewer.live import Watched

    watched = Watched(folders)
    if problems := watched.news("", 0)["problems"]:
        raise UsageError(problems[0])

    def ready(bound: int) -> None:
        address = f"http://{HOST}:{bound}/"
        put(f"{counted(len(folders), 'folder')} at {address}: Ctrl-C ends it", flush=True)
        if open_it:
            webbrowser.open(address)

    serve(view_app(watched), LIMITS, HOST, port, ready)
