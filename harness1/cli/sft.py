"""harness1 sft: from a teacher's episodes to a trained policy."""

from __future__ import annotations

import typer

from harness1.cli.sft_build import build
from harness1.cli.sft_collect import collect
from harness1.cli.sft_train import train

app = typer.Typer(help="Supervised fine-tuning: collect episodes, build rows, train.", no_args_is_help=True)
app.command("collect")(collect)
app.command("build")(build)
app.command("train")(train)
