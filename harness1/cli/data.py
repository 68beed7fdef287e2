"""harness1 data, tasks and push: list, download, convert, make, check and send datasets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from harness1.adapters.hub import pack, send
from harness1.cli.options import Cache, ConfigFile, Force, IndexSpec, Json, Overrides, cache_of, place_of, resolve
from harness1.cli.printing import print_json, print_result, put, say
from harness1.cli.progress import count_of_documents, print_table, progress_of_bytes, progress_of_parts, read_aloud
from harness1.data.benchmarks import BENCHMARKS, benchmark_named
from harness1.data.dataset_cache import BEIR_SETS, by_hand, get_from_hub
from harness1.data.datasets import FINDINGS, DatasetCheck, copy_dataset, import_benchmark
from harness1.data.datasets import check as check_dataset
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.data.source import refuse
from harness1.errors import CorpusError, UsageError
from harness1.models.open import open_completer
from harness1.plain import counted
from harness1.tasks.make import TEMPLATE, write_tasks
from harness1.tasks.questions import MOST_TOKENS, ORACLE, QuestionWriter, TaskCheck, Writing, check_tasks, sample_of
from harness1.viewer.pages import write_view

Name = Annotated[str, Argument(help="A name that `harness1 data list` shows.", metavar="NAME")]
Out = Annotated[Path | None, Option("--out", help="Folder to write; default: in the cache.", metavar="FOLDER")]


def list_benchmarks(config: ConfigFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """List the datasets that are fetched by name, those that the cache has, and what is known of the benchmarks of the
    paper.

    Example: harness1 data list"""
    cache = cache_of(resolve(config, overrides))
    here = cache.datasets()
    if as_json:
        sets = [msgspec.to_builtins(each) for each in BEIR_SETS.values()]
        shown = ("name", "what", "size", "licence", "origin", "files", "verified", "unit")
        rows = [{name: getattr(each, name) for name in shown} for each in BENCHMARKS.values()]
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

    Example: harness1 data get scifact"""
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
    leave_out: Annotated[bool, Option("--leave-out", help="Leave out broken records, and tasks without gold.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
) -> None:
    """Convert an official download into a BEIR folder, and check everything on the way.

    Example: harness1 data import hotpotqa ~/hotpot"""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    benchmark = benchmark_named(name)
    named, out = out is None, out or cache_of(resolve(config, overrides)).place(name)
    left: list[CorpusError] = []
    with count_of_documents(f"importing {name}") as advance:
        counts = import_benchmark(
            benchmark, path, out, fault=left.append if leave_out else refuse, force=force, on_document=advance
        )
    for line in dict.fromkeys(map(str, left)):
        say(f"left out: {line}")
    put(f"{out}: {_size(counts['documents'], counts['tasks'])}")
    unit = " --set index.unit=chunk" if benchmark.unit == "chunk" else ""
    put(f"Next: harness1 eval {name if named else out}{unit}")


def copy(
    dataset: Annotated[str, Argument(help="Any dataset: a name in `data list`, a folder, NAME:PATH or world:SIZE.")],
    out: Annotated[Path, Option(help="The folder to write.", metavar="FOLDER")],
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a dataset as a BEIR folder, which stays as it is.

    Example: harness1 data copy world:2000 --out world"""
    place = place_of(dataset, resolve(config, overrides))
    with count_of_documents(f"copying {dataset}") as advance:
        counts = copy_dataset(place, out, force=force, on_document=advance)
    if as_json:
        print_json(counts)
    else:
        put(f"{out}: {_size(counts['documents'], counts['tasks'])}\nNext: harness1 index {out}")


def _size(documents: int, tasks: Mapping[str, int], more: str = "") -> str:
    by_split = ", ".join(f"{count} {split}" for split, count in tasks.items()) or "none"
    return f"{counted(documents, 'document')}{more}, tasks: {by_split}"


def check(
    dataset: Annotated[str, Argument(help="A name in `data list`, a BEIR or TREC folder, a JSONL file, or NAME:PATH.")],
    ignore: Annotated[list[str] | None, Option(help="A kind of finding to ignore; repeatable.", metavar="KIND")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Find what is wrong with a dataset: broken lines, duplicate ids and texts, empty texts, absent gold, queries
    without gold, and training questions that also appear in the test split. Exit code 1 if it finds any.

    Example: harness1 data check hotpotqa:hotpot"""
    if unknown := sorted(set(ignore or ()) - set(FINDINGS)):
        raise UsageError(f"--ignore takes a kind of finding, not {unknown[0]!r}; there are: {', '.join(FINDINGS)}")
    place = place_of(dataset, resolve(config, overrides))
    with count_of_documents(f"checking {dataset}") as advance:
        report = check_dataset(place, advance)
    kept = tuple(finding for finding in report.findings if finding.kind not in (ignore or ()))
    report = msgspec.structs.replace(report, findings=kept)
    print_result(report, as_json, _show)
    raise typer.Exit(1 if report.findings else 0)


def _show(report: DatasetCheck) -> None:
    chunks = f" in {counted(report.chunks, 'chunk')}" if report.chunks else ""
    put(f"{report.source}: {_size(report.documents, report.tasks, chunks)}")
    _print_findings([(each.kind, each.count, each.examples) for each in report.findings], "it")


def _print_findings(found: Sequence[tuple[str, int, Sequence[str]]], thing: str) -> None:
    for name, count, examples in found:
        put("\n    ".join([f"{name}: {count}", *examples]))
        if count > len(examples):
            put(f"    and {count - len(examples)} more")
    if not found:
        put(f"Nothing is wrong with {thing}.")


READ = 30  # tasks of the sample that can be opened in the viewer


def make_tasks(
    source: Annotated[str, Argument(help="A corpus, as `harness1 index` takes it: a folder of documents, a dataset.")],
    out: Annotated[Path, Option(help="The folder of tasks to create.", metavar="TASKS")],
    count: Annotated[int, Option(help="Tasks to make.", min=1, metavar="N")] = 1000,
    seed: Annotated[int, Option(help="Seed of the choice of sentences and splits.")] = 0,
    writer: Annotated[str, Option(help="Writer of questions.", metavar="template|openai:MODEL@URL|hf:PATH")] = TEMPLATE,
    index: IndexSpec = None,
    cache: Cache = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make questions with gold from documents: facts, chains over several documents, comparisons, claims and aspects.

    Example: harness1 tasks make docs --out tasks/docs --count 200"""
    settings = resolve(config, overrides)
    model = None if writer == TEMPLATE else QuestionWriter(writer, open_completer(writer, settings, MOST_TOKENS))
    corpus = open_source(place_of(source, settings))
    searched = index_of(corpus, index, cache, settings, read_aloud, say)
    with progress_of_parts() as show:
        made = write_tasks(
            corpus,
            searched,
            out,
            settings,
            count=count,
            seed=seed,
            writer=model,
            force=force,
            on_reply=lambda done, of, tokens: show(f"{writer} writes, {tokens:,} tokens", done, of),
            on_task=lambda done, of: show("making tasks", done, of),
        )
    if made["tasks"] < count:
        say(f"the corpus gives {made['tasks']} tasks, not {count}")
    if as_json:
        return print_json(made)
    splits = ", ".join(f"{number} {name}" for name, number in made["splits"].items())
    kinds = ", ".join(f"{number} {name}" for name, number in made["kinds"].items())
    more = made["tasks"] - made["one_search"]
    put(f"{out}: {counted(made['tasks'], 'task')} over {counted(made['documents'], 'document')} ({splits})")
    put(f"    {kinds}; one search does not find all evidence of {more}")
    if "writer" in made:
        by = msgspec.convert(made["writer"], Writing)
        kept = ", ".join(f"{number} {fault}" for fault, number in by.kept.items()) or "none"
        put(f"    {by.writer} wrote {by.written} of the questions; replies that were not taken: {kept}")
        put(f"    it read {by.prompt_tokens:,} tokens and wrote {by.output_tokens:,}")
    return put(f"Next: harness1 tasks check {out}")


def check_task_set(
    tasks: Annotated[str, Argument(help="The folder of tasks, or another dataset.", metavar="TASKS")],
    out: Annotated[Path | None, Option(help="Folder of the runs; default runs/NAME-check.", metavar="FOLDER")] = None,
    sample: Annotated[int, Option(help="Tasks that three policies play.", min=1, metavar="N")] = 200,
    seed: Annotated[int, Option(help="Seed of the sample.")] = 0,
    ignore: Annotated[list[str] | None, Option(help="A kind of finding to ignore; repeatable.", metavar="KIND")] = None,
    index: IndexSpec = None,
    cache: Cache = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Check tasks: answerable, not leaked, not too easy, no near duplicates; with a sample to read in the viewer.

    Exit code 1 if something is wrong with them.

    Example: harness1 tasks check tasks/docs"""
    settings = resolve(config, overrides)
    source = open_source(dataset := place_of(tasks, settings))
    searched = index_of(source, index, cache, settings, read_aloud, say)
    out = out or Path("runs") / f"{source.name.replace(':', '-')}-check"

    def tell(name: str) -> None:
        say(f"{name} is playing")

    drawn = {"sample": sample, "seed": seed}
    report = check_tasks(source, dataset, searched, out, settings, **drawn, ignored=ignore or (), on_policy=tell)
    every = [task for split in source.splits for task in source.tasks(split)]
    shown = [task.task_id for task in sample_of(every, sample, seed)][:READ]
    page = write_view([out / ORACLE], out / "view.html", tasks=shown, workers=1).path
    print_result(report, as_json, print_check, source.name, page)
    raise typer.Exit(1 if report.findings else 0)


def print_check(report: TaskCheck, name: str, page: Path) -> None:
    """Print what the policies reached, kind by kind, and the findings."""
    splits = ", ".join(f"{number} {split}" for split, number in report.tasks.items())
    put(f"{name}: {counted(sum(report.tasks.values()), 'task')} ({splits})")
    rows = []
    for each in report.played:
        values = (each.oracle, each.nothing, each.one_search, each.more_than_one)
        rows.append((each.kind, str(each.tasks), *(f"{value:.3f}" for value in values)))
    print_table(("recall", "tasks", "oracle", "nothing", "one search", "need more"), rows)
    _print_findings([(each.name, each.count, each.examples) for each in report.findings], "them")
    put(f"Some to read: {page}")


def push(
    folder: Annotated[Path, Argument(help="A run, a dataset (BEIR or of `sft build`) or a policy.", metavar="FOLDER")],
    to: Annotated[str, Option(help="The repository on the hub; it is made if there is none.", metavar="OWNER/NAME")],
    public: Annotated[bool, Option("--public", help="Let everybody read a new repository.")] = False,
    own_questions: Annotated[bool, Option("--own-questions", help="What no card tells of is yours.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    endpoint: Annotated[str | None, Option(help="The hub's address, if not its client's.", metavar="URL")] = None,
    as_json: Json = False,
) -> None:
    """Send a run, a dataset or a policy to the Hugging Face hub, for its owner alone unless --public is given.

    The token is the one of the hub's own client: hf auth login.

    Example: harness1 push runs/scifact --to me/scifact-run --dry-run"""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", to):
        raise UsageError(f"--to is OWNER/NAME, not {to!r}")
    with progress_of_bytes() as show:
        parcel = pack(folder, own_questions=own_questions, watch=show)
    files = {name: (folder / name).stat().st_size for name in parcel.files}
    found: dict[str, Any] = {"to": to, "kind": parcel.kind.repository, "public": public, "files": files}
    found["left"] = parcel.left
    if not dry_run:
        found |= send(parcel, to, public=public, endpoint=endpoint)
    if as_json:
        return print_json(found)
    for name, size in files.items() if dry_run else ():
        put(f"{size:>14,}  {name}")
    for name in parcel.left:
        put(f"{'stays':>14}  {name}")
    what = f"{counted(len(files), 'file')}, {sum(files.values()) / 1e6:,.1f} MB"
    if dry_run:
        return put(f"{what} for {to}, {'public' if public else 'private'}; not sent")
    return put(f"{found['url']}: {what}, change {found['commit']}")
