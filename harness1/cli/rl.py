"""harness1 rl: reinforcement learning, from the choice of tasks to a trained policy."""

from __future__ import annotations

import typer

from harness1.cli.rl_check import check
from harness1.cli.rl_export import export
from harness1.cli.rl_pivots import pivots
from harness1.cli.rl_train import train

app = typer.Typer(help="Reinforcement learning: check tasks, find pivots, train, export.", no_args_is_help=True)
app.command("check")(check)
app.command("pivots")(pivots)
app.command("train")(train)
app.command("export")(export)
