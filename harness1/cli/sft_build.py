"""harness1 sft build: make rows for fine-tuning from the episodes of teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Argument, Option

from harness1.cli.bars import progress_of_parts
from harness1.cli.datasets import evaluation_places
from harness1.cli.options import Against, ConfigFile, Exclude, Force, Json, Overrides, resolve
from harness1.cli.printing import print_result, say_torn
from harness1.cli.results import headed
from harness1.cli.terminal import Terminal
from harness1.config import Config
from harness1.errors import UsageError
from harness1.models.chat_format import ChatFormat
from harness1.models.open import format_at
from harness1.runs.folder import run_config
from harness1.sft.build import Build, Listener
from harness1.sft.build import build as build_dataset
from harness1.sft.collect import tokenizer_place
from harness1.sft.data_card import DataCard


def build(
    runs: Annotated[list[Path], Argument(help="Run folders, all of one environment.", metavar="RUN")],
    out: Annotated[Path, Option(help="The dataset folder to create.", metavar="DATASET")],
    against: Against = None,
    exclude: Exclude = None,
    rerender: Annotated[
        bool, Option("--rerender", help="Render the contexts again, for the student of --format and --tokenizer.")
    ] = False,
    chat_format: Annotated[
        str, Option("--format", help="With --rerender: auto, hermes, harmony or compact.", metavar="NAME")
    ] = "",
    tokenizer: Annotated[str, Option(help="With --rerender: the student's tokenizer.", metavar="PATH")] = "",
    partial: Annotated[
        bool, Option("--partial", help="Accept unfinished collections, with the episodes that they have.")
    ] = False,
    licence: Annotated[
        list[str] | None, Option(help="A note on the licence of a dataset, or of all.", metavar="[NAME=]TEXT")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Keep good episodes, make training rows from their turns, and write them with a data card.

    Example: harness1 sft build runs/teacher --out data/teacher --config sft/small
    """
    settings = resolve(config, overrides)
    student = _student(settings, runs, chat_format, tokenizer, rerender=rerender)
    place = tokenizer_place(tokenizer) if student else ""
    given = settings.sft, settings.data, evaluation_places(against, settings), exclude or (), licence or ()
    job = Build(runs, *given, student, place, partial)
    card = _built(job, out, force=force)
    print_result(card, as_json, print_card, out)


def print_card(card: DataCard, out: Path) -> None:
    """Print the counts of each gate, and the number of rows."""
    table = headed("gate", "in", "out")
    for gate in card.gates:
        table.add_row(gate.name, str(gate.entered), str(gate.passed))
    console = Terminal()
    console.print(f"{card.format} rows of {', '.join(run.name for run in card.runs)}", soft_wrap=True)
    console.print(table)
    for name, counts in (("train", card.train), ("held out", card.held_out)):
        trained = f"{counts.trained_tokens} of {counts.tokens} tokens trained"
        console.print(f"{name}: {counts.rows} rows of {counts.tasks} tasks, {trained}")
    for run in card.runs:
        if run.missing:
            console.print(f"{run.folder} is not finished: {run.missing} of its tasks are missing")
    dropped = ", ".join(f"{count} {name}" for name, count in card.dropped_turns.items() if count) or "none"
    console.print(f"turns left out: {dropped}. Everything is in {out}.")


def _student(
    config: Config, runs: Sequence[Path], chat_format: str, tokenizer: str, *, rerender: bool
) -> ChatFormat | None:
    """Return the format for rendering again. A checkpoint must have been trained for the environment of the runs.

    The rows come from that environment, even if the configuration describes another.
    """
    if not rerender:
        if chat_format or tokenizer:
            raise UsageError("--format and --tokenizer say how to render again: give --rerender too")
        return None
    if not tokenizer:
        raise UsageError("--rerender needs --tokenizer, the path of the student's tokenizer")
    policy = msgspec.structs.replace(config.policy, format=chat_format or config.policy.format)
    env = run_config(runs[0])[0].env
    return format_at(tokenizer, msgspec.structs.replace(config, policy=policy, env=env))


def _built(job: Build, out: Path, *, force: bool) -> DataCard:
    with progress_of_parts() as show:
        return build_dataset(job, out, force=force, listener=Listener(say_torn, show))
