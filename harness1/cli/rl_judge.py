"""The part of `harness1 rl check` in which a model reads well-paid episodes for tricks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from harness1.cli.bars import progress_of_work
from harness1.cli.terminal import Terminal
from harness1.config import Config
from harness1.errors import UsageError
from harness1.models.open import Completing
from harness1.records import Task
from harness1.rl.red_team import REPLIES, RedTeamReport, Review, best_paid, open_judge
from harness1.rl.train import EPISODES

JudgeModel = Annotated[
    str, Option(help="A model that reads well-paid episodes for tricks.", metavar="openai:MODEL@URL|hf:PATH")
]
JudgedRun = Annotated[
    Path | None, Option(help="With --judge: read the episodes of this run, not the check's own.", metavar="RUN")
]
Judged = Annotated[int, Option(help="With --judge: about this many episodes.", min=1)]


def asked_judge(name: str, run: Path | None, config: Config) -> Completing | None:
    """Open the judge, if there is one; raise UsageError if only its run is named."""
    if run is not None and not name:
        raise UsageError("--run names the episodes that a judge reads: give --judge too")
    return open_judge(name, config) if name else None


def judge_runs(
    judge: Completing, name: str, runs: Sequence[Path], tasks: Sequence[Task], count: int, out: Path, *, force: bool
) -> RedTeamReport:
    """Have the best-paid episodes of runs judged, under a bar. A training is read by the run in it.

    Args:
        tasks: the tasks whose gold is known.
        count: about as many episodes.
        force: ask again what was answered.

    Raises:
        UsageError, SchemaError: as `best_paid` and `Review.carry_out`.
    """
    golds = {task.task_id: task.gold for task in tasks if task.gold is not None}
    folders = [run / EPISODES if (run / EPISODES).is_dir() else run for run in runs]
    if force:
        (out / REPLIES).unlink(missing_ok=True)
    review = Review(best_paid(folders, count, golds), name, judge)
    with progress_of_work() as progress:
        bar = progress.add_task(f"{name} judges", total=len(review.episodes))
        return review.carry_out(out, lambda: progress.advance(bar))


def print_findings(found: RedTeamReport) -> None:
    """Print what a judge found, and what it cost."""
    console = Terminal()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items())) or "none"
    console.print(
        f"{found.judge} read {found.episodes} well-paid episodes: {found.honest} honest, {found.tricks} with a trick"
        f" ({kinds}), {found.invalid} replies that cannot be checked, {found.missing} missing.",
        soft_wrap=True,
    )
    for each in found.findings:
        place = f"{Path(each.run).name}, task {each.task_id}, reward {each.reward:.3f}, turn {each.turn}"
        console.print(f"  {each.kind}: {place}: {each.quote!r}", soft_wrap=True)
    for fault in found.faults:
        console.print(f"  missing: {fault}", soft_wrap=True)
    console.print(f"The judge read {found.prompt_tokens:,} tokens and wrote {found.output_tokens:,}.")
