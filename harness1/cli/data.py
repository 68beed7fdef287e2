"""harness1 data: list, download, convert and check datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from harness1.cli.bars import count_of_documents, progress_of_bytes
from harness1.cli.datasets import cache_of, place_of
from harness1.cli.options import ConfigFile, Force, Json, Overrides, resolve
from harness1.cli.printing import print_json, print_result, put, say
from harness1.data.benchmarks import BENCHMARKS, Benchmark, benchmark_named
from harness1.data.check import FINDINGS, Report, encoded
from harness1.data.check import check as check_dataset
from harness1.data.copying import copy_dataset, import_benchmark
from harness1.data.dataset_cache import BEIR_SETS
from harness1.data.fetch import by_hand, get_from_hub
from harness1.data.source import Fault, refuse
from harness1.errors import CorpusError, UsageError
from harness1.plain import counted

Name = Annotated[str, Argument(help="A name that `harness1 data list` shows.", metavar="NAME")]
Out = Annotated[
    Path | None, Option("--out", help="The folder to write; default the dataset's in the cache.", metavar="FOLDER")
]


def list_benchmarks(config: ConfigFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """List the datasets that are fetched by name, those that the cache has, and what is known of the benchmarks of the
    paper.

    Example: harness1 data list
    """
    cache = cache_of(resolve(config, overrides))
    here = cache.datasets()
    if as_json:
        sets = [msgspec.to_builtins(each) for each in BEIR_SETS.values()]
        rows = [each.row() for each in BENCHMARKS.values()]
        print_json({"benchmarks": rows, "beir": sets, "cache": str(cache.folder), "cached": here})
        return
    for benchmark in BENCHMARKS.values():
        put(f"{benchmark.name}: {benchmark.what}")
        put(f"    size      {benchmark.size}; scored by {benchmark.unit}")
        put(f"    licence   {benchmark.licence}")
        put(f"    where     {benchmark.origin}")
        put("    files     " + "\n              ".join(benchmark.files))
        put(f"    verified  {benchmark.verified}.")
    put("\nThe datasets of BEIR:")
    for each in BEIR_SETS.values():
        put(f"    {each.name:<17} {each.size}: {each.what}")
    put("\nOWNER/NAME is a dataset of the hub in BEIR layout.")
    put(f"In the cache, {cache.folder}: {', '.join(here) or 'none'}.")


def get(
    name: Annotated[str, Argument(help="A name that `harness1 data list` shows, or OWNER/NAME on the hub.")],
    out: Out = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
) -> None:
    """Download a dataset into the cache, where its name finds it; or the official files of a benchmark into a folder.

    Example: harness1 data get scifact
    """
    if out is None:
        with progress_of_bytes() as show:
            place = cache_of(resolve(config, overrides), show).get(name, force=force)
        put(f"{name} is in {place}\nNext: harness1 eval {name}")
        return
    benchmark = benchmark_named(name)
    get_from_hub(name, benchmark.hub, out, by_hand(benchmark), force=force)
    put(f"{out}: the files that the hub has of {name}")
    if benchmark.by_hand:
        put(f"Still needed: {benchmark.by_hand}.")
    put(f"Next: harness1 data check {name}:{out}")


def import_(
    name: Name,
    path: Annotated[Path, Argument(help="The official files: a folder, or a single file.", metavar="PATH")],
    out: Out = None,
    leave_out: Annotated[
        bool, Option("--leave-out", help="Leave out broken records, and tasks whose gold is absent.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
) -> None:
    """Convert an official download into a BEIR folder, and check everything on the way; or unpack an archive of BEIR.

    Example: harness1 data import hotpotqa ~/hotpot
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    cache = cache_of(resolve(config, overrides))
    if path.suffix == ".zip":
        if out is not None or leave_out:
            raise UsageError("an archive of BEIR goes into the cache: leave --out and --leave-out out")
        put(f"{name} is in {cache.place_archive(name, path)}\nNext: harness1 eval {name}")
        return
    benchmark = benchmark_named(name)
    named, out = out is None, out or cache.place(name)
    left: list[str] = []
    with count_of_documents(f"importing {name}") as advance:
        counts = import_benchmark(
            benchmark, path, out, fault=_noting(left) if leave_out else refuse, force=force, on_document=advance
        )
    for line in dict.fromkeys(left):
        say(f"left out: {line}")
    tasks = ", ".join(f"{count} {split}" for split, count in counts["tasks"].items())
    put(f"{out}: {counted(counts['documents'], 'document')}, tasks: {tasks}")
    _say_next(benchmark, name if named else str(out))


def copy(
    dataset: Annotated[str, Argument(help="Any dataset: a name in `data list`, a folder, NAME:PATH or world:SIZE.")],
    out: Annotated[Path, Option(help="The folder to write.", metavar="FOLDER")],
    limit: Annotated[int, Option(help="Take only the first N tasks of each split; 0 means all.", min=0)] = 0,
    most_gold: Annotated[
        int, Option(help="Leave out tasks with more than N relevant documents; 0 means none.", min=0)
    ] = 0,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a dataset, or some of its tasks, as a BEIR folder, which stays as it is.

    Example: harness1 data copy world:2000 --most-gold 2 --out world
    """
    place = place_of(dataset, resolve(config, overrides))
    with count_of_documents(f"copying {dataset}") as advance:
        counts = copy_dataset(place, out, limit=limit, most_gold=most_gold, force=force, on_document=advance)
    print_result(counts, as_json, _print_copied, out)


def _print_copied(counts: dict[str, Any], out: Path) -> None:
    tasks = ", ".join(f"{count} {split}" for split, count in counts["tasks"].items()) or "none"
    put(f"{out}: {counted(counts['documents'], 'document')}, tasks: {tasks}")
    put(f"Next: harness1 index {out}")


def check(
    dataset: Annotated[str, Argument(help="A name in `data list`, a BEIR or TREC folder, a JSONL file, or NAME:PATH.")],
    ignore: Annotated[
        list[str] | None, Option(help="A kind of finding to ignore; may be repeated.", metavar="KIND")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Find what is wrong with a dataset: broken lines, duplicate ids and texts, empty texts, absent gold, queries
    without gold, and training questions that also appear in the test split. Exit code 1 if it finds any.

    Example: harness1 data check hotpotqa:hotpot
    """
    if unknown := sorted(set(ignore or ()) - set(FINDINGS)):
        raise UsageError(f"--ignore takes a kind of finding, not {unknown[0]!r}; there are: {', '.join(FINDINGS)}")
    place = place_of(dataset, resolve(config, overrides))
    with count_of_documents(f"checking {dataset}") as advance:
        report = check_dataset(place, advance)
    kept = tuple(finding for finding in report.findings if finding.kind not in (ignore or ()))
    report = msgspec.structs.replace(report, findings=kept)
    put(encoded(report).decode()) if as_json else _show(report)
    raise typer.Exit(1 if report.findings else 0)


def _show(report: Report) -> None:
    chunks = f" in {counted(report.chunks, 'chunk')}" if report.chunks else ""
    tasks = ", ".join(f"{count} {split}" for split, count in report.tasks.items()) or "none"
    put(f"{report.source}: {counted(report.documents, 'document')}{chunks}, tasks: {tasks}")
    for each in report.shared:
        put(
            f"{each.shared} of {counted(each.documents, 'gold document')} of {each.split} are gold of train too"
            f" ({each.shared / each.documents:.0%}); {counted(each.tasks, 'task')} of train share a gold set with it"
        )
    for finding in report.findings:
        put(f"{finding.kind}: {finding.count}")
        for example in finding.examples:
            put(f"    {example}")
        if finding.count > len(finding.examples):
            put(f"    and {finding.count - len(finding.examples)} more")
    if not report.findings:
        put("Nothing is wrong with it.")


def _say_next(benchmark: Benchmark, dataset: str) -> None:
    unit = " --set index.unit=chunk" if benchmark.unit == "chunk" else ""
    put(f"Next: harness1 eval {dataset}{unit}")


def _noting(left: list[str]) -> Fault:
    def note(error: CorpusError) -> None:
        left.append(str(error))

    return note
