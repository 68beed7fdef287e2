"""harness1 rl export: episodes of a policy as rows for an existing distributed trainer."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harness1.adapters.skyrl.export import Export
from harness1.adapters.skyrl.export import export as write_export
from harness1.cli.bars import progress_of_parts
from harness1.cli.options import Force, Json
from harness1.cli.printing import print_result, say_torn
from harness1.cli.terminal import Terminal
from harness1.rl.learning import EPISODES
from harness1.runs.stage import read_stage


class TrainerName(StrEnum):
    """The trainer to write rows for."""

    SKYRL = "skyrl"


def export(
    run: Annotated[
        Path, Argument(help="An output folder of `rl train`, or a run of `eval --samples 8`.", metavar="RUN")
    ],
    out: Annotated[Path, Option(help="The folder to create.", metavar="DIR")],
    to: Annotated[TrainerName, Option(help="The trainer to write for.")] = TrainerName.SKYRL,
    groups_per_file: Annotated[
        int, Option(help="Groups in each file; 0: rl.groups of the run, or all groups.", min=0, metavar="N")
    ] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write groups of episodes for SkyRL's step-wise training: the exact tokens of every model call to train on, with
    recorded log probabilities and the reward on the last step. A README in the folder explains how to use them.

    Example: harness1 rl export better --to skyrl --out batches
    """
    inner = run / EPISODES  # the run folder within a training folder
    made = _made(inner if read_stage(inner) else run, out, groups_per_file, force=force)
    print_result(made, as_json, _print, out, to)


def _made(run: Path, out: Path, groups_per_file: int, *, force: bool) -> Export:
    with progress_of_parts() as show:
        return write_export(run, out, groups_per_file, force=force, on_torn=partial(say_torn, run), on_progress=show)


def _print(made: Export, out: Path, to: TrainerName) -> None:
    console = Terminal()
    console.print(
        f"{made.files} files of {made.groups_per_file} groups: {made.episodes} episodes, {made.steps} steps,"
        f" {made.tokens} tokens, versions {made.versions[0]} to {made.versions[1]}"
    )
    for noun, counts in (("episodes", made.left_out_episodes), ("groups", made.left_out_groups)):
        left_out = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()) or "none"
        console.print(f"{noun} left out: {left_out}")
    console.print(f"{out / 'README.md'} says how to feed them to {to.value}.")
