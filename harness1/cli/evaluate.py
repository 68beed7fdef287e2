"""harness1 eval and answer: a policy over a dataset, its mechanisms, and what its sets are good for."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from harness1.cli import options
from harness1.cli.options import place_of, resolve
from harness1.cli.playing import evaluate_aloud, print_comparison, print_metrics, refuse_faults
from harness1.cli.policies import PolicyName
from harness1.cli.printing import print_result, put, say, say_torn
from harness1.cli.progress import print_table, progress_of_work, read_aloud
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.errors import InfrastructureFault, UsageError
from harness1.eval.ablations import ABLATIONS, conditions
from harness1.eval.answer_run import METRICS, AnswerRun, open_answers
from harness1.eval.answers import CONDITIONS
from harness1.eval.compare import compare
from harness1.eval.evaluate import Evaluation, rescore
from harness1.eval.metrics import fault_count
from harness1.eval.run import read_run
from harness1.eval.statistics import probability
from harness1.models.spec import is_model
from harness1.policy.registry import check_policy
from harness1.sft.collect import student_place
from harness1.viewer.pages import ensure_view

Ablations = Annotated[
    str | None,
    Option(
        "--ablations",
        help=f"Also run without each of these, one at a time: {', '.join(ABLATIONS)}, or all.",
        metavar="NAME,NAME",
    ),
]
StudentTokenizer = Annotated[
    str,
    Option(help="A model's path: count and write turns as it does; not for policies that are models.", metavar="PATH"),
]
Rescored = Annotated[bool, Option("--rescore", help="First score what is recorded with changed gold or reward.")]


def evaluate(
    dataset: options.DatasetName,
    policy: PolicyName = "scripted",
    split: Annotated[str, Option(help="The split to take tasks from; default test, else dev.")] = "",
    tokenizer: StudentTokenizer = "",
    limit: options.Limit = 0,
    samples: options.Samples = 1,
    seed: options.Seed = 0,
    index: options.IndexSpec = None,
    out: Annotated[Path | None, Option(help="Run folder; default runs/DATASET-SPLIT-POLICY.")] = None,
    cache: options.Cache = None,
    ablations: Ablations = None,
    tools: options.Tools = None,
    rewards: options.Rewards = None,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    faults: options.CountedFaults = "exclude",
    allow_faults: options.AllowFaults = 0,
    force: options.Force = False,
    rescored: Rescored = False,
    view: Annotated[bool, Option("--view/--no-view", help="Write view.html with the worst and the best tasks.")] = True,
    as_json: options.Json = False,
) -> None:
    """Run a policy over the tasks of a dataset. The index is built once and kept; a stopped run is resumed.

    Where the infrastructure broke an episode even after retries, the exit code is 3; the same command plays it again.

    Example: harness1 eval world:1000 --policy scripted --limit 50 --out runs/world"""
    if force and rescored:
        raise UsageError("--force plays again and --rescore scores without playing: choose one")
    if tokenizer and is_model(policy):
        raise UsageError(f"{policy} counts with its own tokenizer: leave --tokenizer out")
    settings = resolve(config, overrides, policy, tokenizer, tools=tools, rewards=rewards)
    check_policy(policy, settings)
    source = open_source(dataset := place_of(dataset, settings))
    split = split or ("dev" if "test" not in source.splits and "dev" in source.splits else "test")
    tasks = source.tasks(split)
    if limit > len(tasks) > 0:
        say(f"{source.name} has {len(tasks)} tasks in split {split}, not {limit}")
    tasks = tasks[: limit or None]
    name = f"{source.name}-{split}-{policy}{'' if ablations is None else '-ablations'}"
    out = out or Path("runs") / name.replace(":", "-").replace("/", "-")
    asked = index_of(source, index, cache, settings, read_aloud, say)
    student = student_place(tokenizer, source, tasks, settings) if tokenizer else ""
    job = Evaluation(dataset, split, tasks, asked, policy, settings, samples, seed, student=student, faults=faults)
    if ablations is not None:
        return run_ablations(job, out, ablations, allow_faults, force=force, rescored=rescored, as_json=as_json)
    if rescored:
        rescore(job, out)
    metrics = evaluate_aloud(job, out, force)
    if view:
        ensure_view(out, tasks)
    print_result(metrics, as_json, print_metrics, f"{policy} on {source.name}/{split}", out)
    return refuse_faults({policy: fault_count(metrics)}, metrics["episodes"], allow_faults)


def ablation_names(words: str) -> tuple[str, ...]:
    """Return the ablations that a user names, separated by commas; `all` means all of them."""
    named = [word.strip() for word in words.split(",")]
    return tuple(dict.fromkeys(name for word in named for name in (ABLATIONS if word == "all" else (word,))))


def run_ablations(
    evaluation: Evaluation, out: Path, words: str, allow_faults: int, *, force: bool, rescored: bool, as_json: bool
) -> None:
    """Play an evaluation with all mechanisms and without each of some (`words`, as in `ablation_names`), in folders
    below `out`, and print what the others lose or gain."""
    names = ablation_names(words)
    played, broken = conditions(evaluation, names), dict[str, int]()
    if skipped := [name for name in names if name not in played]:
        say(f"skipped, because it is off in the base: {', '.join(skipped)}")
    if len(played) == 1:
        raise UsageError("nothing is left to take away")
    for number, (name, each) in enumerate(played.items(), 1):
        say(f"condition {number} of {len(played)}: {name}")
        if rescored:
            rescore(each, out / name)
        broken[name] = fault_count(evaluate_aloud(each, out / name, force))
    runs = [read_run(out / name, tasks=evaluation.tasks) for name in played]
    print_comparison(compare(runs), [run.folder for run in runs], as_json=as_json)
    refuse_faults(broken, evaluation.episodes * len(broken), allow_faults)


def answer(
    run: Annotated[Path, Argument(help="The folder of a finished run.", metavar="RUN")],
    answerer: Annotated[str, Option(help="The model that answers.", metavar="openai:MODEL@URL")],
    conditions: Annotated[str, Option(help="Some of closed, single, curated.", metavar="NAMES")] = ",".join(CONDITIONS),
    judge: Annotated[str, Option(help="A model that judges the answers too.", metavar="openai:MODEL@URL")] = "",
    limit: options.Limit = 0,
    tokens: Annotated[int, Option(help="Maximum number of tokens for documents in one prompt.", min=1)] = 24000,
    answer_tokens: Annotated[int, Option(help="Most tokens of an answer with its reasoning.", min=1)] = 1024,
    out: Annotated[Path | None, Option(help="Output folder; default RUN/answers/MODEL.", metavar="FOLDER")] = None,
    index: Annotated[str | None, Option(help="The run's index, if it has moved.", metavar="SPEC")] = None,
    dataset: Annotated[str | None, Option(help="The run's dataset, if it has moved.", metavar="PLACE")] = None,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Let a frozen model answer the questions of a run: closed book, from one search, and from the curated sets.

    The answerer's key is machine.model.key, the judge's machine.verifier.key; machine.concurrency are asked at once.
    Exit code 3 if an answer or a verdict is missing; the same command asks for it again.

    Example: harness1 answer runs/world --answerer openai:gpt-4o-mini@https://api.openai.com/v1"""
    machine = resolve(config, overrides).machine
    found, models = read_run(run, dataset), (answerer, judge)
    answering = open_answers(found, out, machine, *models, conditions, answer_tokens, index, limit, tokens)
    if force:
        answering.clear()
    summary = answering.load_summary() or _carry_out(answering)
    print_result(summary, as_json, print_answers, answering.out)
    if missing := summary["missing"] + summary["missing_verdicts"]:
        fault = f" ({summary['faults'][0]})" if summary["faults"] else ""
        raise InfrastructureFault(f"{missing} answers or verdicts are missing{fault}; the same command asks again")


def print_answers(summary: dict[str, Any], out: Path) -> None:
    """Print the conditions with their intervals, their differences, and what could not be scored."""
    put(f"{summary['answerer']['model']} on {summary['run']}")
    rows = [
        (name, metric, f"{found['mean']:.3f}", _interval(found), str(row["tasks"]), f"{row['documents']:.1f}")
        for name, row in summary["conditions"].items()
        for metric in METRICS
        if (found := row[metric])["mean"] is not None
    ]
    if rows:
        heads = ("condition", "metric", "mean", "95 % interval", "tasks", "documents")
        print_table(heads, rows, range(2, 6))
    rows = []
    for pair in summary["pairs"]:
        found, p, corrected = pair["difference"], probability(pair["p"]), probability(pair["p_holm"])
        shown = f"{found['mean']:+.3f}", _interval(found, "+.3f"), p, corrected
        rows.append((f"{pair['a']} - {pair['b']}", pair["metric"], *shown))
    if rows:
        heads = ("paired differences", "metric", "mean", "95 % interval", "p", "Holm p")
        print_table(heads, rows, range(2, 6))
    by_condition = summary["conditions"].values()
    counts = {
        "missing answers": summary["missing"],
        "missing verdicts": summary["missing_verdicts"],
        "empty answers": sum(row["empty"] for row in by_condition),
        "answers cut off": sum(row["cut"] for row in by_condition),
        "verdicts that are none": sum(row["unparseable"] for row in by_condition),
        "tasks without a right answer": summary["without_answers"],
        "broken episodes": summary["broken_episodes"],
        "documents without room": sum(row["left_out"] for row in by_condition),
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    put(f"{summary['tasks']} tasks{told and f'; {told}'}. Everything is in {out}.")


def _interval(value: dict[str, float], form: str = ".3f") -> str:
    return f"{value['low']:{form}} to {value['high']:{form}}"


def _carry_out(answering: AnswerRun) -> dict[str, Any]:
    progress = progress_of_work()
    bar = progress.add_task("answering", total=None)
    with ExitStack() as shown:

        def start(total: int) -> None:
            progress.update(bar, total=total)
            shown.enter_context(progress)  # not before, because refused work needs no bar

        return answering.carry_out(start, lambda _: progress.advance(bar), partial(say_torn, answering.out))
