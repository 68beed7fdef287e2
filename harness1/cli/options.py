"""Options that several verbs share, and how they become a configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness1.config import Config, load_config

ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file over the defaults.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one setting, e.g. env.max_turns=4.", metavar="A.B=VALUE")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Do it again although it is done.")]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        help="scripted, single-shot, random, oracle, oracle-teacher, replay:RUN, hf:PATH, vllm:PATH, vllm:MODEL@URL,"
        " sglang:MODEL@URL or openai:MODEL@URL; or one of those that `rl check` plays, such as no-op.",
        metavar="NAME",
    ),
]

Limit = Annotated[int, typer.Option("--limit", help="The first N tasks; 0 means all.", min=0)]
Samples = Annotated[int, typer.Option("--samples", help="Episodes for each task.", min=1)]
Seed = Annotated[int, typer.Option("--seed", help="For policies that draw, and for the bootstrap.")]
IndexSpec = Annotated[
    str | None,
    typer.Option("--index", help="An index or engine to ask, instead of indexing the dataset.", metavar="SPEC"),
]
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Where indexes are kept; default ~/.cache/harness1.", metavar="DIR")
]


def resolve(path: Path | None, overrides: list[str] | None) -> Config:
    """Return the configuration that a command line asks for."""
    return load_config(path, overrides)


def say_torn(run: Path, size: int) -> None:
    """Tell the user that the last line of a record, which a crash had torn, was dropped."""
    if size:
        print(f"harness1: {run}: a torn last line ({size} bytes) was dropped", file=sys.stderr)
