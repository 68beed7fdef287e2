"""harness1 data: list, download, convert and check the benchmarks of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from harness1.cli.bars import count_of_documents
from harness1.cli.options import Force, Json
from harness1.cli.printing import counted, print_json, put, say
from harness1.data.benchmarks.registry import BENCHMARKS, Benchmark, benchmark_named
from harness1.data.check import FINDINGS, Report, encoded
from harness1.data.check import check as check_dataset
from harness1.data.faults import Fault, refuse
from harness1.data.fetching import get_benchmark
from harness1.data.importing import import_benchmark
from harness1.errors import CorpusError, UsageError

Name = Annotated[str, Argument(help="A name that `harness1 data list` shows.", metavar="NAME")]
Out = Annotated[Path, Option("--out", help="The folder to write.", metavar="FOLDER")]


def list_benchmarks(as_json: Json = False) -> None:
    """List the benchmarks: description, size, licence, source, the files that a folder must hold, and what the reader
    was verified against.

    Example: harness1 data list
    """
    if as_json:
        print_json({"benchmarks": [each.row() for each in BENCHMARKS.values()]})
        return
    for benchmark in BENCHMARKS.values():
        put(f"{benchmark.name}: {benchmark.what}")
        put(f"    size      {benchmark.size}; scored by {benchmark.unit}")
        put(f"    licence   {benchmark.licence}")
        put(f"    where     {benchmark.origin}")
        put("    files     " + "\n              ".join(benchmark.files))
        put(f"    verified  {benchmark.verified}.")


def get(name: Name, out: Out, force: Force = False) -> None:
    """Download the official files from the Hugging Face hub, if it can be reached.

    Example: harness1 data get frames --out frames
    """
    benchmark = benchmark_named(name)
    get_benchmark(benchmark, out, force=force)
    put(f"{out}: the files that the hub has of {name}")
    if benchmark.by_hand:
        put(f"Still needed: {benchmark.by_hand}.")
    put(f"Next: harness1 data check {name}:{out}")


def import_(
    name: Name,
    path: Annotated[Path, Argument(help="The official files: a folder, or a single file.", metavar="PATH")],
    out: Out,
    leave_out: Annotated[
        bool, Option("--leave-out", help="Leave out broken records, and tasks whose gold is absent.")
    ] = False,
    force: Force = False,
) -> None:
    """Convert an official download into a BEIR folder, and check everything on the way.

    Example: harness1 data import hotpotqa ~/hotpot --out hotpotqa
    """
    benchmark = benchmark_named(name)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    left: list[str] = []
    with count_of_documents(f"importing {name}") as advance:
        counts = import_benchmark(
            benchmark, path, out, fault=_noting(left) if leave_out else refuse, force=force, on_document=advance
        )
    for line in dict.fromkeys(left):
        say(f"left out: {line}")
    tasks = ", ".join(f"{count} {split}" for split, count in counts["tasks"].items())
    put(f"{out}: {counted(counts['documents'], 'document')}, tasks: {tasks}")
    _say_next(benchmark, out)


def check(
    dataset: Annotated[str, Argument(help="A BEIR or TREC folder, a JSONL file, or NAME:PATH.")],
    ignore: Annotated[
        list[str] | None, Option(help="A kind of finding to ignore; may be repeated.", metavar="KIND")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find what is wrong with a dataset: broken lines, duplicate ids and texts, empty texts, absent gold, queries
    without gold, and training questions that also appear in the test split. Exit code 1 if it finds any.

    Example: harness1 data check hotpotqa:hotpot
    """
    if unknown := sorted(set(ignore or ()) - set(FINDINGS)):
        raise UsageError(f"--ignore takes a kind of finding, not {unknown[0]!r}; there are: {', '.join(FINDINGS)}")
    with count_of_documents(f"checking {dataset}") as advance:
        report = check_dataset(dataset, advance)
    kept = tuple(finding for finding in report.findings if finding.kind not in (ignore or ()))
    report = msgspec.structs.replace(report, findings=kept)
    put(encoded(report).decode()) if as_json else _show(report)
    raise typer.Exit(1 if report.findings else 0)


def _show(report: Report) -> None:
    chunks = f" in {counted(report.chunks, 'chunk')}" if report.chunks else ""
    tasks = ", ".join(f"{count} {split}" for split, count in report.tasks.items()) or "none"
    put(f"{report.source}: {counted(report.documents, 'document')}{chunks}, tasks: {tasks}")
    for finding in report.findings:
        put(f"{finding.kind}: {finding.count}")
        for example in finding.examples:
            put(f"    {example}")
        if finding.count > len(finding.examples):
            put(f"    and {finding.count - len(finding.examples)} more")
    if not report.findings:
        put("Nothing is wrong with it.")


def _say_next(benchmark: Benchmark, out: Path) -> None:
    unit = " --set index.unit=chunk" if benchmark.unit == "chunk" else ""
    put(f"Next: harness1 eval {out}{unit}")


def _noting(left: list[str]) -> Fault:
    def note(error: CorpusError) -> None:
        left.append(str(error))

    return note
