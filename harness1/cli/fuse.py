"""harness1 fuse: several rollouts of each task as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harness1.cli.options import Force, Json, MovedDataset
from harness1.cli.printing import print_result, say
from harness1.cli.results import print_metrics
from harness1.eval.fusion import CAP, write_fused
from harness1.eval.fusion import fuse as fuse_runs
from harness1.eval.run_view import read_run
from harness1.viewer.report import ensure_report


def fuse(
    runs: Annotated[list[Path], Argument(help="Run folders of the same tasks and index.", metavar="RUN")],
    out: Annotated[Path, Option(help="The run folder to write.", metavar="RUN")],
    k: Annotated[int, Option(help="Constant of the fusion: the higher, the less the first ranks stand out.")] = 60,
    cap: Annotated[int, Option(help="Maximum number of units in a fused set.")] = CAP,
    dataset: MovedDataset = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fuse several rollouts of each task, the samples of a run or several runs, into one run by reciprocal rank.

    Example: harness1 fuse runs/sampled --out runs/fused
    """
    views = [read_run(run, dataset) for run in runs]
    fusion = fuse_runs(views, k, cap)
    metrics = write_fused(fusion, views, out, force)
    ensure_report(out, views[0].tasks.values())
    if fusion.left_out:
        say(f"rollouts left out because the infrastructure broke them: {fusion.left_out}")
    print_result(metrics, as_json, print_metrics, str(fusion.stage.outputs["policy"]), out)
