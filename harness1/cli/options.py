"""Options that several verbs share, what is made from them, and harness1 config."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Argument, Option

from harness1.cli.printing import print_json, put, say
from harness1.config import Config, configurations, load_config, opening
from harness1.config.settings import differences, notes
from harness1.config.training import RECIPES
from harness1.data.leaks import ShareName
from harness1.errors import UsageError
from harness1.models.spec import policy_config
from harness1.plain import digest
from harness1.plugins import KINDS, installed_plugins
from harness1.policy.registry import NAMES
from harness1.records import Faults
from harness1.runs.folder import public_config, toml_lines

if TYPE_CHECKING:
    from harness1.data.dataset_cache import DatasetCache, Progress

ConfigFile = Annotated[
    str | None, Option("--config", help="A TOML file of settings, or a name in `config list`.", metavar="FILE|NAME")
]
Overrides = Annotated[list[str] | None, Option("--set", help="One setting, as env.max_turns=4.", metavar="A.B=VALUE")]
Tools = Annotated[
    list[str] | None,
    Option("--tool", help="Also offer a tool (repeatable): FILE.py:NAME, or a plugin's.", metavar="NAME"),
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
    str, Option("--engine", help="A service: tinker:MODEL[@URL], or a plugin's.", metavar="ENGINE")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object to standard output and nothing else.")]
Force = Annotated[bool, Option("--force", help="Redo the work even if it is already done.")]
DatasetName = Annotated[str, Argument(help="A name, BEIR or TREC folder, NAME:PATH or world:SIZE.", metavar="DATASET")]

ShareOf = Annotated[
    ShareName, Option("--share", help="One share of tasks: sft has data.sft_share, rl the rest.", metavar="sft|rl")
]
Against = Annotated[
    list[str] | None, Option(help="Also keep apart from these; its dev and test count too.", metavar="DATASET[:SPLIT]")
]
Exclude = Annotated[
    list[Path] | None, Option(help="Leave out the tasks of a run, SFT dataset, checkpoint or profile.", metavar="RUN")
]

Limit = Annotated[int, Option(help="Take only the first N tasks; 0 means all.", min=0)]
Samples = Annotated[int, Option(help="Episodes for each task.", min=1)]
Seed = Annotated[int, Option(help="Seed of policies that sample, and of the bootstrap.")]
CountedFaults = Annotated[Faults, Option("--faults", help="How episodes that the infrastructure broke count in means.")]
AllowFaults = Annotated[int, Option("--allow-faults", help="Most broken ones without exit code 3.", metavar="N", min=0)]
IndexSpec = Annotated[
    str | None,
    Option("--index", "--retriever", help="Search this index, engine or FILE.py:NAME instead.", metavar="SPEC"),
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
        callback=lambda minutes: time.monotonic() + 60 * minutes,  # a reading of the clock
    ),
]

RecipeName = Annotated[str, Argument(help="A TOML file, or a name that `recipe list` shows.", metavar="RECIPE")]
RecipeChanges = Annotated[list[str] | None, Option("--set", help="A value, as sft.train.rate=1e-3.", metavar="A=VALUE")]
RecipeInputs = Annotated[list[str] | None, Option("--input", help="What the recipe asks for.", metavar="NAME=PLACE")]


def resolve(
    config: str | None,
    overrides: list[str] | None,
    *models: str,
    tools: list[str] | None = None,
    rewards: list[str] | None = None,
) -> Config:
    """Return the configuration that a command line asks for. Of the models at work, the first that was trained here
    brings its environment, unless the file of `--config` has settings of `env`; single settings are overridden either
    way. Without `--config`, a released policy brings the configuration that it was measured with."""
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
            try:
                weights[name] = float(weight) if sign else 1.0
            except ValueError:
                raise UsageError(f"--reward {given}: the weight {weight!r} is no number") from None
    load = partial(load_config, tools=tools or (), rewards=weights)
    asked = [model for model in models if model and model not in NAMES]
    config = config or next(filter(None, map(policy_config, asked)), None)
    settings = load(config, overrides)
    if not asked:
        return settings
    # Here, because verbs without a model start sooner so.
    from harness1.models.checkpoint import describe_environment, environment_of

    for model in asked:
        if (env := environment_of(model, settings)) is not None:
            carried = load(config, overrides, env)
            if carried.env != settings.env:
                say(describe_environment(model, settings.env, carried.env))
            return carried
    return settings


def place_of(spec: str, config: Config) -> str:
    """Return a dataset as `open_source` takes it, fetched if it is a name; InfrastructureFault if it cannot be."""
    from harness1.cli.progress import progress_of_bytes  # here, as verbs without bars start sooner so

    if not names_dataset(spec):
        return spec
    if found := cache_of(config).find(spec):
        return found
    with progress_of_bytes() as show:
        return cache_of(config, show).get(spec)


def evaluation_places(specs: Sequence[str] | None, config: Config) -> tuple[str, ...]:
    """Return evaluation sets, `DATASET` or `DATASET:SPLIT`, as `evaluation_sets` takes them; raise as `place_of`."""

    def place(spec: str) -> str:
        dataset, colon, split = spec.partition(":")
        # `world:SIZE` and `BENCHMARK:FOLDER` have a colon of their own.
        if not colon or dataset == "world" or Path(split).exists() or not names_dataset(dataset):
            return place_of(spec, config)
        return f"{place_of(dataset, config)}:{split}"

    return tuple(map(place, specs or ()))


def names_dataset(spec: str) -> bool:
    """Return whether a dataset is given by name: neither a path nor a missing file in a folder that exists."""
    from harness1.data.dataset_cache import is_name

    path = Path(spec)
    return spec != "stdlib" and is_name(spec) and not path.exists() and ("/" not in spec or not path.parent.exists())


def cache_of(config: Config, progress: Progress | None = None) -> DatasetCache:
    """Return the cache of datasets on this machine."""
    from harness1.data.dataset_cache import DatasetCache  # here, as few verbs need a dataset by name

    machine = config.machine
    folder = Path(machine.data).expanduser() if machine.data else cache_home(os.environ, sys.platform) / "data"
    shown = progress or (lambda part, done, of: None)
    return DatasetCache(folder, say, shown)


def cache_home(environment: Mapping[str, str], system: str) -> Path:
    """Return the folder for what can be fetched again, where the system's conventions have it."""
    if system == "darwin":
        return Path.home() / "Library" / "Caches" / "harness1"
    name = "LOCALAPPDATA" if system == "win32" else "XDG_CACHE_HOME"
    below = Path(environment.get(name, ""))
    return (below if below.is_absolute() else Path.home() / ".cache") / "harness1"


def list_shipped(as_json: Json = False) -> None:
    """List the configurations that come with the package: names for --config, and what each is for.

    Example: harness1 config list"""
    rows = [{"name": name, "what": opening(file), "file": str(file)} for name, file in configurations().items()]
    if as_json:
        print_json({"configurations": rows})
    else:
        put("\n".join(f"{row['name']}: {row['what']}" for row in rows))


def show(config: ConfigFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print what differs from the defaults, then every setting as TOML with what it decides, the hashes computed from
    the settings, and what other installed packages add.

    Example: harness1 config show --set env.max_turns=4"""
    resolved = resolve(config, overrides)
    hashes = config_hashes(resolved)
    tree = public_config(resolved)
    plugins = installed_plugins()
    if as_json:
        print_json({"config": tree, "hashes": hashes, "plugins": plugins})
        return
    default = public_config(Config())
    for name, value, usual in differences(tree, default):
        put(f"# {name} = {msgspec.json.encode(value).decode()}, by default {msgspec.json.encode(usual).decode()}")
    put("\n".join(toml_lines(tree, notes(Config))))
    put("\n".join(f"# {name} = {value}" for name, value in hashes.items()))
    for kind, packages in plugins.items():
        put("\n".join(f"# installed {KINDS[kind]}: {name}, of {package}" for name, package in packages.items()))


def config_hashes(config: Config) -> dict[str, str]:
    """Return the hashes that depend only on a configuration; `index_hash` needs a corpus too."""
    from harness1.env.environment import SearchEnv
    from harness1.episodes.rollout import Nowhere

    env = SearchEnv(config.env, Nowhere("", config.index.unit))
    return {"env_hash": env.hash, "reward_hash": config.reward_hash, "index_settings": digest(config.index.to_hash())}
