"""harness1 answer: let a frozen model answer the questions of a run from its curated sets."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from harness1.cli.bars import progress_of_work
from harness1.cli.options import ConfigFile, Force, Json, Limit, Overrides, resolve
from harness1.cli.printing import print_result, say_torn
from harness1.cli.results import headed
from harness1.cli.terminal import Terminal
from harness1.errors import InfrastructureFault
from harness1.eval.answer_run import METRICS, AnswerRequest, AnswerRun, open_answers
from harness1.eval.answers import CONDITIONS
from harness1.eval.run import read_run
from harness1.eval.statistics import probability


def answer(
    run: Annotated[Path, Argument(help="The folder of a finished run.", metavar="RUN")],
    answerer: Annotated[str, Option(help="The model that answers.", metavar="openai:MODEL@URL")],
    conditions: Annotated[
        str, Option(help="The documents it gets, one or more of closed, single, curated.", metavar="NAMES")
    ] = ",".join(CONDITIONS),
    judge: Annotated[str, Option(help="A model that judges the answers too.", metavar="openai:MODEL@URL")] = "",
    limit: Limit = 0,
    single_size: Annotated[
        int, Option(help="Number of documents from the single search; 0: as many as were curated.", min=0)
    ] = 0,
    documents: Annotated[int, Option(help="Maximum number of documents in one prompt.", min=1)] = 30,
    tokens: Annotated[int, Option(help="Maximum number of tokens for these documents.", min=1)] = 24000,
    answer_tokens: Annotated[
        int, Option(help="Maximum number of tokens of an answer, including the reasoning before it.", min=1)
    ] = 1024,
    out: Annotated[Path | None, Option(help="Output folder; default RUN/answers/MODEL.", metavar="FOLDER")] = None,
    index: Annotated[str | None, Option(help="The run's index, if it has moved.", metavar="SPEC")] = None,
    dataset: Annotated[str | None, Option(help="The run's dataset, if it has moved.", metavar="PLACE")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Let a frozen model answer the questions of a run: closed book, from one search, and from the curated sets.

    The answerer's key, deadline and concurrency are those of machine.model, the judge's those of machine.verifier. Exit
    code 3 if an answer or a verdict is missing; the same command asks for it again.

    Example: harness1 answer runs/world --answerer openai:gpt-4o-mini@https://api.openai.com/v1
    """
    machine = resolve(config, overrides).machine
    asked = AnswerRequest(answerer, judge, conditions, limit, single_size, documents, tokens, answer_tokens, index)
    answering = open_answers(read_run(run, dataset), asked, out, machine)
    if force:
        answering.clear()
    summary = answering.found() or _carried_out(answering)
    print_result(summary, as_json, print_answers, answering.out)
    _refuse_missing(summary)


def _refuse_missing(summary: dict[str, Any]) -> None:
    if missing := summary["missing"] + summary["missing_verdicts"]:
        fault = f" ({summary['faults'][0]})" if summary["faults"] else ""
        raise InfrastructureFault(f"{missing} answers or verdicts are missing{fault}; the same command asks again")


def print_answers(summary: dict[str, Any], out: Path) -> None:
    """Print the conditions with their intervals, their differences, and what could not be scored."""
    console = Terminal()
    console.print(f"{summary['answerer']['model']} on {summary['run']}", soft_wrap=True)
    columns = ("condition", "metric", "mean", "95 % interval", "tasks", "documents")
    table = headed(*columns, left=("metric",))
    for name, row in summary["conditions"].items():
        for metric in (metric for metric in METRICS if row[metric]["mean"] is not None):
            mean, tasks, documents = f"{row[metric]['mean']:.3f}", str(row["tasks"]), f"{row['documents']:.1f}"
            table.add_row(name, metric, mean, _interval(row[metric]), tasks, documents)
    if table.row_count:
        console.print(table)
    columns = ("paired differences", "metric", "mean", "95 % interval", "p", "Holm p")
    table = headed(*columns, left=("metric",))
    for pair in summary["pairs"]:
        difference = pair["difference"]
        values = (
            f"{difference['mean']:+.3f}",
            _interval(difference, "+.3f"),
            probability(pair["p"]),
            probability(pair["p_holm"]),
        )
        table.add_row(f"{pair['a']} - {pair['b']}", pair["metric"], *values)
    if summary["pairs"]:
        console.print(table)
    console.print(_account(summary), f"Everything is in {out}.", soft_wrap=True)


def _account(summary: dict[str, Any]) -> str:
    """Return a sentence with the counts behind the numbers."""
    rows = summary["conditions"].values()
    counted = {
        "missing answers": summary["missing"],
        "missing verdicts": summary["missing_verdicts"],
        "empty answers": sum(row["empty"] for row in rows),
        "answers cut off": sum(row["cut"] for row in rows),
        "verdicts that are none": sum(row["unparseable"] for row in rows),
        "tasks without a right answer": summary["without_answers"],
        "broken episodes": summary["broken_episodes"],
        "documents without room": sum(row["left_out"] for row in rows),
    }
    told = ", ".join(f"{count} {name}" for name, count in counted.items() if count)
    return f"{summary['tasks']} tasks" + (f"; {told}." if told else ".")


def _interval(value: dict[str, float], form: str = ".3f") -> str:
    return f"{value['low']:{form}} to {value['high']:{form}}"


def _carried_out(answering: AnswerRun) -> dict[str, Any]:
    progress = progress_of_work()
    bar = progress.add_task("answering", total=None)
    with ExitStack() as shown:

        def start(total: int) -> None:
            progress.update(bar, total=total)
            shown.enter_context(progress)  # not before, because refused work needs no bar

        return answering.carry_out(start, lambda _: progress.advance(bar), partial(say_torn, answering.out))
