"""The whole configuration as one frozen value, from TOML plus dotted overrides. Defaults are the published constants
(Harness-1, arXiv 2606.02373; see `shipped/paper.toml`), except that documents are ranked by evidence (the mechanisms
`rank` and `leads`, `env.auto_populate.by`, `env.read.by`), and that text from outside is marked (`marks`)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config.env import (
    AutoPopulate,
    Compression,
    Curation,
    Dense,
    Env,
    Evidence,
    FanOut,
    History,
    Index,
    Leads,
    PoolView,
    Read,
    Rendering,
    Rerank,
    Retrieval,
    Search,
    Verification,
    read_recorded,
    with_mechanisms,
)
from harness1.config.machine import Fleet, Machine, Model, ModelServer, Web
from harness1.config.settings import (
    RUN,
    SWITCHES,
    Settings,
    present,
    to_hash,
    unite,
    without_removed,
)
from harness1.config.training import (
    AUTO,
    FORMATS,
    TERMS,
    ChatPolicy,
    Data,
    Gates,
    Lora,
    Reward,
    Rl,
    Sft,
    Train,
    Validation,
    fastest_dtype,
    sum_of,
    with_recipe,
    with_weights,
)
from harness1.errors import MALFORMED, ConfigError
from harness1.plain import digest, meant, utf8_safe
from harness1.plugins import load_plugin, plugin_names, short_name, whole_name

FORMER = "run"  # The old name of `[machine]`. Recorded cards and hashes still use it.
LONGEST = 64 << 10
"""Bytes of the longest configuration file; all settings, with what they say of themselves, take less than half."""
_UNKNOWN = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?$")


class Config(Settings):
    """Every setting, in one immutable value. Each section says in its file what it decides, in which units, and where
    its defaults come from; `load_config` makes one from a file.

    Raises:
        ConfigError: two settings contradict each other. `msgspec.convert` alone checks the range of each.
    """

    env: Env = Env()
    policy: ChatPolicy = ChatPolicy()
    index: Index = Index()
    reward: Reward = Reward()
    data: Data = Data()
    sft: Sft = Sft()
    rl: Rl = Rl()
    train: Train = Train()
    machine: Machine = Machine()

    def __post_init__(self) -> None:
        if self.env.generation_reserve >= self.env.context_window:
            raise ConfigError("env.generation_reserve must be smaller than env.context_window")
        if self.env.rendering.window[1] < self.env.rendering.window[0]:
            raise ConfigError("env.rendering.window must begin with the smaller number")
        if self.env.has("pruning") and self.env.rendering.order != "transcript":
            raise ConfigError(
                "the mechanism pruning needs env.rendering.order=transcript: the other orders drop old turns anyway"
            )

    @property
    def reward_hash(self) -> str:
        return digest(self.reward.to_hash())

    @property
    def batches(self) -> int:
        """Return the batches of reinforcement learning: `rl.batches`, unless `train.max_steps` ends it earlier."""
        most = -(-self.train.max_steps // self.rl.substeps)
        return min(self.rl.batches, most) if most else self.rl.batches

    @property
    def hash(self) -> str:
        """Return the hash of all settings except `[machine]`, which affects no result, and `[data]`, of the tasks."""
        without_keys = msgspec.structs.replace(self, machine=Machine())  # no key can be encoded
        tree = to_hash(without_keys, "")
        tree |= {"env": self.env.to_hash(), "reward": self.reward.to_hash(), FORMER: dict(RUN)}
        del tree["machine"], tree["data"]
        return digest(tree)


def load_config(
    path: Path | str | None = None,
    overrides: list[str] | None = None,
    env: Mapping[str, Any] | None = None,
    tools: Sequence[str] = (),
    rewards: Mapping[str, float] = MappingProxyType({}),
) -> Config:
    """Return the defaults, overlaid with a TOML file, overlaid with `a.b=value` settings.

    Reward weights set by neither are those of `reward.recipe`; an override of the recipe replaces the file's whole
    `[reward]` section. A `dtype` of `auto` becomes the type that is faster here (`fastest_dtype`). Defaults are the
    published constants (Harness-1, arXiv 2606.02373) but for five settings of the environment.

    Args:
        path: a TOML file with any of the keys that `harness1 config show` prints, or the name of a configuration that
            comes with the package, such as `small`; `harness1 config list` prints them.
        overrides: settings such as `env.max_turns=4`; a value is read as TOML, or as a string if it is not TOML.
        env: the settings of the environment instead of the defaults, if the file has none.
        tools: further tools for `env.plugins`, such as `FILE.py:NAME`.
        rewards: the weights of the terms whose sum is the reward, by name, in place of what the file says of it.

    Raises:
        ConfigError: there is no such file or name, a key is unknown, a value has the wrong type or is out of range, or
            the file is not TOML, or is longer than `LONGEST`.
        UsageError: a plugin that it names is not installed, or cannot be imported.
    """
    tree: dict[str, Any] = {} if path is None else read_toml(config_file(path), path)
    if env is not None:
        tree.setdefault("env", deepcopy(dict(env)))  # overrides are written into it
    if any(override.partition("=")[0].strip() == "reward.recipe" for override in overrides or []):
        tree.pop("reward", None)
    _put_in_place(tree)
    for override in overrides or []:
        _overlay(tree, _to_weight(override))
        _put_in_place(tree)
    tree = present(tree, "")
    if isinstance(tree.get("reward"), dict):
        tree["reward"] = with_recipe(tree["reward"])
    for section in ("policy", "train"):
        if isinstance(group := tree.get(section), dict) and group.get("dtype") == AUTO:
            group["dtype"] = fastest_dtype()
    try:
        found = msgspec.convert(tree, Config)
        reward = sum_of(rewards) if rewards else found.reward
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"configuration: {_place_error(str(error))}{_guess(str(error))}") from error
    known = set(map(whole_name, found.env.plugins))  # what a model learned with may be named again
    plugins = (*found.env.plugins, *(tool for tool in tools if whole_name(tool) not in known))
    whole, reward = with_whole_names(msgspec.structs.replace(found.env, plugins=plugins), reward)
    found = msgspec.structs.replace(found, env=whole, reward=reward)
    _refuse_infinite(msgspec.to_builtins(msgspec.structs.replace(found, machine=found.machine.public())))
    refuse_unknown_plugins(whole, reward, found.policy)
    return found


def _put_in_place(tree: dict[str, Any]) -> None:
    if FORMER in tree:
        raise ConfigError(f"configuration: [{FORMER}] is called [machine] now")
    unite(tree)
    if isinstance(env := tree.get("env"), dict):
        tree["env"] = env = with_mechanisms(env)
        for group, name in SWITCHES.values():
            if isinstance(settings := env.get(group), dict) and name in settings:
                raise ConfigError(f"configuration: env.{group}.{name}: expected bool, not {settings[name]!r}")


def read_toml(file: Path, named: Path | str) -> Any:
    """Return what a TOML file says; raise ConfigError as `load_config` does. The parser takes the square of the time
    for long keys."""
    try:
        with file.open("rb") as opened:
            text = opened.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ConfigError(f"{named} is longer than {LONGEST:,} bytes, which no configuration is")
        return msgspec.toml.decode(text)
    except FileNotFoundError as error:
        raise ConfigError(unknown_config(named)) from error
    except OSError as error:
        raise ConfigError(f"cannot read {named}: {error.strerror}") from error
    except MALFORMED as error:
        raise ConfigError(f"{named} is not TOML: {error}") from error


def present_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration under current names, with the mechanisms that it did not know switched off."""
    present = {"machine" if name == FORMER else name: section for name, section in deepcopy(tree).items()}
    unite(present)
    if isinstance(machine := present.get("machine"), dict) and isinstance(prices := machine.get("price"), dict):
        present["machine"] = machine | {"price": [prices.get(name, 0.0) for name in ("prompt", "cached", "output")]}
    if isinstance(present.get("env"), dict):
        present["env"] = with_mechanisms(read_recorded(present["env"]))
    if isinstance(reward := present.get("reward"), dict) and "weights" not in reward:
        present["reward"] = with_weights(reward)
    return without_removed(present)


def _refuse_infinite(tree: Mapping[Any, Any], prefix: str = "") -> None:
    """Refuse numbers that TOML has and a card, which is JSON, has not."""
    for name, value in tree.items():
        if isinstance(value, dict | list | tuple):
            _refuse_infinite(value if isinstance(value, dict) else dict(enumerate(value)), f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"configuration: {prefix}{name} must be a finite number, not {value}")


def _place_error(error: str) -> str:
    what, _, place = error.rstrip("`").partition(" - at `$")
    words = what.replace("`", "").replace("Object contains unknown field", "There is no setting")
    words = words[:1].lower() + words[1:]
    return f"{place.lstrip('.')}: {words}" if place else words


def _guess(error: str) -> str:
    if not (found := _UNKNOWN.search(error)):
        return ""
    path = ".".join(filter(None, (found[2], found[1])))
    switches = [f"env.{name}" for group, switch in SWITCHES.values() for name in (group, f"{group}.{switch}")]
    names = {*_names(msgspec.to_builtins(Config())), *(f"reward.{term}" for term in TERMS), *switches}
    near = get_close_matches(path, sorted(names - {path, path.rpartition(".")[0]}), 1, 0.8)
    return f"; did you mean {near[0]}?" if near else ""


def _names(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    below = [_names(value, f"{prefix}{name}.") for name, value in tree.items() if isinstance(value, dict)]
    return [f"{prefix}{name}" for name in tree] + [name for names in below for name in names]


def _to_weight(override: str) -> str:
    """Return an override with a reward term where it is now, in `reward.weights`: it prevails over a file's."""
    path, sign, value = override.partition("=")
    name = path.strip().removeprefix("reward.").removeprefix("plugins.")
    moved = path.strip() in (f"reward.plugins.{name}", *(f"reward.{term}" for term in TERMS))
    return f"reward.weights.{name}{sign}{value}" if moved else override


def _overlay(tree: dict[str, Any], override: str) -> None:
    path, sign, text = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys) or utf8_safe(override) != override:
        raise ConfigError(f"--set takes a.b=value in UTF-8, not {override!r}")
    for key in keys[:-1]:
        node = tree.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{override!r}: {key} is a value, not a group of settings")
        tree = node
    try:
        tree[keys[-1]] = msgspec.toml.decode(f"value = {text.strip()}")["value"]
    except MALFORMED:
        tree[keys[-1]] = text.strip()


SHIPPED = Path(__file__).parent / "shipped"


def configurations() -> dict[str, Path]:
    """Return the files of the configurations that come with the package, by name."""
    files = sorted(SHIPPED.rglob("*.toml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in files}


def config_file(named: Path | str) -> Path:
    """Return the file of a configuration that comes with the package, or else the path itself: a name means the same in
    every folder, and a file of that name is written `./small`."""
    return configurations().get(str(named), Path(named))


def unknown_config(named: Path | str) -> str:
    """Return what to tell a user whose configuration is neither a file nor a name."""
    names, stem = configurations(), Path(named).as_posix().removesuffix(".toml")
    stem = max((name for name in names if stem.endswith(f"/{name}")), key=len, default=stem)
    return f"there is no configuration {named}: give a TOML file, or one of {', '.join(names)}{meant(stem, names)}"


def opening(file: Path) -> str:
    """Return the first sentence of the comment that a configuration begins with."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    return " ".join(" ".join(line.lstrip("# ") for line in lines).split()).partition(". ")[0].rstrip(".") + "."


def with_whole_names(env: Env, reward: Reward) -> tuple[Env, Reward]:
    """Return the settings with the paths of one's own files made absolute, so that they are found from anywhere."""
    env = msgspec.structs.replace(env, plugins=tuple(map(whole_name, env.plugins)))
    weights = {whole_name(name): weight for name, weight in reward.weights.items()}
    return env, msgspec.structs.replace(reward, weights=weights)


def refuse_unknown_plugins(env: Env, reward: Reward, policy: ChatPolicy) -> None:
    """Import the tools, the reward terms and the chat format that settings name of other packages or of files. Raise
    ConfigError if two have one name or there is no such format, UsageError as `load_plugin` does."""
    named = (("env.plugins", env.plugins, "tool"), ("reward.weights", tuple(reward.others), "term"))
    for setting, names, what in named:
        if any(count > 1 for count in Counter(map(short_name, names)).values()):
            raise ConfigError(f"{setting} names a {what} twice: {', '.join(names)}")
    for tool in env.plugins:
        load_plugin("tools", tool)
    for term in reward.others:
        load_plugin("rewards", term)
    if policy.format not in (AUTO, *FORMATS) and policy.format not in plugin_names("formats"):
        names = (AUTO, *FORMATS, *plugin_names("formats"))
        raise ConfigError(
            f"policy.format: there is no chat format {policy.format!r}; choose {', '.join(names)}"
            f"{meant(policy.format, names)}"
        )
