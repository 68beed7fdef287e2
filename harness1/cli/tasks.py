"""harness1 tasks: make tasks from a corpus, and check them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from harness1.cli.bars import progress_of_parts, read_aloud
from harness1.cli.datasets import place_of
from harness1.cli.options import Cache, ConfigFile, Force, IndexSpec, Json, Overrides, resolve
from harness1.cli.printing import print_result, put, say
from harness1.cli.results import headed
from harness1.cli.terminal import Terminal
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.models.open import open_completer
from harness1.plain import counted
from harness1.tasks.make import TEMPLATE, write_tasks
from harness1.tasks.questions import MOST_TOKENS, ORACLE, TaskCheck, Writer, Writing, check_tasks, sample_of
from harness1.viewer.pages import Asked, write_view

WRITERS = f"{TEMPLATE}|openai:MODEL@URL|hf:PATH"
READ = 30
"""Tasks of the sample that can be opened in the viewer."""


def make(
    source: Annotated[str, Argument(help="A corpus, as `harness1 index` takes it: a folder of documents, a dataset.")],
    out: Annotated[Path, Option(help="The folder of tasks to create.", metavar="TASKS")],
    count: Annotated[int, Option(help="Tasks to make.", min=1, metavar="N")] = 1000,
    seed: Annotated[int, Option(help="Seed of the choice of sentences and splits.")] = 0,
    writer: Annotated[
        str,
        Option(help="Who writes the questions: templates, or a model.", metavar="template|openai:MODEL@URL|hf:PATH"),
    ] = TEMPLATE,
    index: IndexSpec = None,
    cache: Cache = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make questions with gold from documents: facts, chains over several documents, comparisons, claims and aspects.

    Example: harness1 tasks make docs --out tasks/docs --count 200
    """
    settings = resolve(config, overrides)
    model = None if writer == TEMPLATE else Writer(writer, open_completer(writer, settings, MOST_TOKENS))
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
    print_result(made, as_json, print_made, out)


def print_made(made: dict[str, Any], out: Path) -> None:
    """Print how many tasks there are, of which kinds and in which splits."""
    splits = ", ".join(f"{number} {name}" for name, number in made["splits"].items())
    kinds = ", ".join(f"{number} {name}" for name, number in made["kinds"].items())
    more = made["tasks"] - made["one_search"]
    put(f"{out}: {counted(made['tasks'], 'task')} over {counted(made['documents'], 'document')} ({splits})")
    put(f"    {kinds}; one search does not find all evidence of {more}")
    if "writer" in made:
        writer = msgspec.convert(made["writer"], Writing)
        kept = ", ".join(f"{number} {fault}" for fault, number in writer.kept.items()) or "none"
        put(f"    {writer.writer} wrote {writer.written} of the questions; replies that were not taken: {kept}")
        put(f"    it read {writer.prompt_tokens:,} tokens and wrote {writer.output_tokens:,}")
    put(f"Next: harness1 tasks check {out}")


def check(
    tasks: Annotated[str, Argument(help="The folder of tasks, or another dataset.", metavar="TASKS")],
    out: Annotated[
        Path | None, Option(help="The folder of the runs; default runs/NAME-check.", metavar="FOLDER")
    ] = None,
    sample: Annotated[int, Option(help="Tasks that three policies play.", min=1, metavar="N")] = 200,
    seed: Annotated[int, Option(help="Seed of the sample.")] = 0,
    ignore: Annotated[
        list[str] | None, Option(help="A kind of finding to leave out; may be repeated.", metavar="KIND")
    ] = None,
    index: IndexSpec = None,
    cache: Cache = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Check tasks: answerable, not leaked, not too easy, no near duplicates; with a sample to read in the viewer.

    Exit code 1 if something is wrong with them.

    Example: harness1 tasks check tasks/docs
    """
    settings = resolve(config, overrides)
    source = open_source(dataset := place_of(tasks, settings))
    searched = index_of(source, index, cache, settings, read_aloud, say)
    out = out or Path("runs") / f"{source.name.replace(':', '-')}-check"
    report = check_tasks(
        source,
        dataset,
        searched,
        out,
        settings,
        sample=sample,
        seed=seed,
        ignored=ignore or (),
        on_policy=lambda name: say(f"{name} is playing"),
    )
    every = [task for split in source.splits for task in source.tasks(split)]
    shown = [task.task_id for task in sample_of(every, sample, seed)][:READ]
    page = write_view(Asked([out / ORACLE], tasks=shown, workers=1), out / "view.html").path
    print_result(report, as_json, print_check, source.name, page)
    raise typer.Exit(1 if report.findings else 0)


def print_check(report: TaskCheck, name: str, page: Path) -> None:
    """Print what the policies reached, kind by kind, and the findings."""
    splits = ", ".join(f"{number} {split}" for split, number in report.tasks.items())
    put(f"{name}: {counted(sum(report.tasks.values()), 'task')} ({splits})")
    table = headed("recall", "tasks", "oracle", "nothing", "one search", "need more")
    for each in report.played:
        values = (each.oracle, each.nothing, each.one_search, each.more_than_one)
        table.add_row(each.kind, str(each.tasks), *(f"{value:.3f}" for value in values))
    Terminal().print(table)
    for finding in report.findings:
        put(f"{finding.name}: {finding.count}")
        for example in finding.examples:
            put(f"    {example}")
    if not report.findings:
        put("Nothing is wrong with them.")
    put(f"Some to read: {page}")
