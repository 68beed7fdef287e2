"""Options that several verbs share, and the configuration made from them."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harness1.cli.printing import say
from harness1.config import Config, load_config
from harness1.config.training import RECIPES
from harness1.data.leaks import ShareName
from harness1.errors import UsageError
from harness1.eval.metrics import Faults

ConfigFile = Annotated[
    str | None,
    Option(
        "--config",
        help="Settings to begin with: a TOML file, or a name that `harness1 config list` shows.",
        metavar="FILE|NAME",
    ),
]
Overrides = Annotated[
    list[str] | None, Option("--set", help="Override one setting, e.g. env.max_turns=4.", metavar="A.B=VALUE")
]
Tools = Annotated[
    list[str] | None,
    Option("--tool", help="Also offer a tool: FILE.py:NAME, or a plugin's. May be repeated.", metavar="NAME"),
]
Rewards = Annotated[
    list[str] | None,
    Option(
        "--reward",
        help="Score by the sum of such terms alone: FILE.py:NAME, a plugin's, or one of ours, such as recall; each with"
        " =WEIGHT, or 1. Or by a recipe: paper or robust.",
        metavar="NAME[=WEIGHT]",
    ),
]
EngineOption = Annotated[
    str,
    Option(
        "--engine",
        help="A training service in place of this machine: tinker:MODEL, tinker:MODEL@URL, or a plugin's.",
        metavar="ENGINE",
    ),
]
Json = Annotated[bool, Option("--json", help="Print one JSON object to standard output and nothing else.")]
Force = Annotated[bool, Option("--force", help="Redo the work even if it is already done.")]
DatasetName = Annotated[
    str, Argument(help="A name in `data list`, a BEIR or TREC folder, NAME:PATH or world:SIZE.", metavar="DATASET")
]

ShareOf = Annotated[
    ShareName,
    Option(
        "--share",
        help="Take only one share of the split's tasks: sft has the fraction data.sft_share, rl the others.",
        metavar="sft|rl",
    ),
]
Against = Annotated[
    list[str] | None,
    Option(
        help="Also leave out what leaks into these evaluation sets; dev and test of the same dataset count anyway.",
        metavar="DATASET[:SPLIT]",
    ),
]
Exclude = Annotated[
    list[Path] | None,
    Option(help="Leave out the tasks of an earlier run, SFT dataset, checkpoint or profile.", metavar="RUN"),
]

Limit = Annotated[int, Option(help="Take only the first N tasks; 0 means all.", min=0)]
Samples = Annotated[int, Option(help="Episodes for each task.", min=1)]
Seed = Annotated[int, Option(help="Seed of policies that sample, and of the bootstrap.")]
CountedFaults = Annotated[
    Faults, Option("--faults", help="How episodes that the infrastructure broke count in the means.")
]
AllowFaults = Annotated[
    int, Option("--allow-faults", help="Most episodes that it may have broken without exit code 3.", metavar="N", min=0)
]
IndexSpec = Annotated[
    str | None,
    Option(
        "--index",
        "--retriever",
        help="An index or engine to search, or a retriever as FILE.py:NAME, instead of indexing the dataset.",
        metavar="SPEC",
    ),
]
Cache = Annotated[Path | None, Option(help="Folder that keeps indexes; default ~/.cache/harness1.", metavar="DIR")]
MovedDataset = Annotated[str | None, Option(help="The runs' dataset, if it has moved.", metavar="PLACE")]
Tensorboard = Annotated[bool, Option("--tensorboard", help="Also write event files for TensorBoard.")]
Wandb = Annotated[str, Option(help="Also log to this project of Weights & Biases.", metavar="PROJECT")]
EndsAt = Annotated[
    float,
    Option(
        "--minutes",
        help="Begin no batch after this time: write the checkpoint, and end. 0: only end an interrupted run.",
        min=0,
        show_default=False,
        callback=lambda minutes: time.monotonic() + 60 * minutes,
    ),
]
"""A reading of `time.monotonic`."""
Mlflow = Annotated[str, Option(help="Also log to this experiment of MLflow.", metavar="EXPERIMENT[@URI]")]

RecipeName = Annotated[str, Argument(help="A TOML file, or a name that `recipe list` shows.", metavar="RECIPE")]
RecipeChanges = Annotated[
    list[str] | None,
    Option("--set", help="Change a value, or a setting of a stage, e.g. sft.train.rate=1e-3.", metavar="A=VALUE"),
]
RecipeInputs = Annotated[
    list[str] | None, Option("--input", help="A file or folder that the recipe asks for.", metavar="NAME=PLACE")
]


def resolve(
    config: str | None,
    overrides: list[str] | None,
    *models: str,
    tools: list[str] | None = None,
    rewards: list[str] | None = None,
) -> Config:
    """Return the configuration that a command line asks for.

    Args:
        models: models at work, as typed. The first that was trained here brings its environment, unless the file of
            `--config` has settings of `env`; single settings are overridden either way. Without `--config`, a released
            policy brings the configuration that it was measured with.
        tools: as `--tool` takes them.
        rewards: as `--reward` takes them.
    """
    weights: dict[str, float] = {}
    recipes = [given for given in rewards or () if given in ("paper", *RECIPES) and given != "sum"]
    if recipes and len(rewards or ()) > 1:
        raise UsageError(f"--reward {recipes[0]} is a whole reward: give it alone, or terms alone")
    for given in rewards or ():
        name, sign, weight = given.rpartition("=")
        if given in recipes:
            overrides = [*(overrides or []), f"reward.recipe={given}"]
        elif (name := name if sign else given) in weights:
            raise UsageError(f"--reward names {name} twice")
        else:
            weights[name] = _weight(given, weight) if sign else 1.0
    load = partial(load_config, tools=tools or (), rewards=weights)
    if not any(models):
        return load(config, overrides)
    # Imported here, because verbs without a model start sooner without it.
    from harness1.models.open import environment_of, told
    from harness1.models.spec import released_config

    config = config or next(filter(None, map(released_config, models)), None)
    settings = load(config, overrides)
    for model in filter(None, models):
        if (env := environment_of(model, settings)) is not None:
            carried = load(config, overrides, env)
            if carried.env != settings.env:
                say(told(model, settings.env, carried.env))
            return carried
    return settings


def _weight(given: str, weight: str) -> float:
    try:
        return float(weight)
    except ValueError:
        raise UsageError(f"--reward {given}: the weight {weight!r} is no number") from None
