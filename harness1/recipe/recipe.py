"""A recipe: stages in order, each a command of `harness1` with its settings and its gates, as a TOML file says them."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from harness1.config import read_toml
from harness1.errors import MALFORMED, ConfigError, UsageError
from harness1.plain import digest
from harness1.recipe.gates import GATES

SHIPPED = Path(__file__).parent / "shipped"
PLAIN = (
    *("compare", "view", "replay", "index check", "push", "help"),
    *("models get", "models convert", "models merge", "models list"),
)
"""What verbs begin with that take no `--config` and `--set`."""
_NAME = re.compile(r"\{([a-z][a-z0-9_-]*)\}")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]*")

Value = str | int | float | bool


class RecipeStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of a recipe."""

    run: str
    """A command without `harness1`; `{out}` is the stage's folder, `{NAME}` an earlier stage, a value or an input."""
    says: str = ""
    """What the stage does, for the reader of its progress."""
    config: str | None = None
    """The configuration that it begins with, in place of the recipe's; empty: the defaults."""
    set: dict[str, Any] = {}
    """Settings for `--set`, by dotted name, or in nested tables; a string may name values."""
    processes: Annotated[int, Meta(ge=1)] = 1
    """Processes that train together, started by torchrun; of `sft train` and `rl train`."""
    gates: dict[str, float | bool] = {}
    """Bounds of gates in place of their defaults; false leaves a gate out."""
    takes: float = 0.0
    """Seconds that it took on two quiet cores, by which the time left is told; 0: not known."""

    def __post_init__(self) -> None:
        shlex.split(self.run)  # raises ValueError for a quotation that does not end


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values that trials give one setting: a range, or choices."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Draw the logarithm evenly."""
    whole: bool = False
    """Draw whole numbers."""
    choices: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.choices) == (self.low is not None and self.high is not None):
            raise ValueError("give low and high, or choices")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError("low must be below high")
        if self.low is not None and self.high is not None and not math.isfinite(self.high - self.low):
            raise ValueError("low and high must be finite, and so must be their difference")
        if self.whole and any(end % 1 for end in (self.low or 0.0, self.high or 0.0)):
            raise ValueError("whole needs whole numbers as low and high")
        if self.log and not (self.low or 0.0) > 0.0:
            raise ValueError("log needs low above 0")

    def holds(self, value: Value) -> bool:
        """Return whether a trial could have this value."""
        if self.low is None or self.high is None:
            return value in self.choices
        return not isinstance(value, str) and self.low <= value <= self.high


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What trials are compared by."""

    stage: str
    metric: str
    """A metric of that stage's card or metrics, such as `reward`."""
    maximize: bool = True
    looks: dict[str, str] = {}
    """By stage, a metric by which a trial that is behind is stopped there; more is better if the objective says so."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A recipe as its file says it. Raises ConfigError: a stage names what does not come before it, or a gate that does
    not exist."""

    title: str
    stages: dict[str, RecipeStage]
    config: str = ""
    """The configuration that every stage begins with, for `--config`."""
    set: dict[str, Any] = {}
    """Settings of every stage."""
    values: dict[str, Value] = {}
    """Numbers and names that commands use."""
    inputs: dict[str, str] = {}
    """Files, folders and names that commands use and that must stay as they were at the start."""
    search: dict[str, Space] = {}
    """The settings that trials vary: `VALUE`, or `STAGE.SETTING`."""
    objective: Objective | None = None

    def __post_init__(self) -> None:
        known = {"out", *self.values, *self.inputs}
        for name, stage in self.stages.items():
            if not _STAGE_NAME.fullmatch(name) or name in known:
                raise ConfigError(f"{name} cannot be the name of a stage: it is taken, or not lower case")
            for each in names_in(stage):
                if each not in known:
                    raise ConfigError(f"stage {name} uses {{{each}}}, which is no value, no input and no stage before")
            for gate in stage.gates:
                if gate not in GATES:
                    raise ConfigError(f"stage {name} has a gate {gate}; there are {', '.join(GATES)}")
            known.add(name)
        for name in self.search:
            varied, dot, _ = name.partition(".")
            if name not in self.values and not (dot and varied in self.stages):
                raise ConfigError(f"search varies {name}, which is no value and no setting of a stage")
        looked = [self.objective.stage, *self.objective.looks] if self.objective else []
        for name in looked:
            if name not in self.stages:
                raise ConfigError(f"the objective names the stage {name}, which does not exist")

    @cached_property
    def hash(self) -> str:
        """The hash of everything that decides what is done; titles and gates do not."""
        stages = {name: (stage.run, stage.config, stage.set) for name, stage in self.stages.items()}
        return digest([stages, self.config, self.set, self.values, self.inputs])

    def words(self, name: str, work: Path) -> tuple[str, ...]:
        """Return the command of a stage, without `harness1`, in the folder `work`."""
        stage, folders = self.stages[name], {each: str(work / each) for each in self.stages}
        values = {key: _text(value) for key, value in self.values.items()}
        known = {**values, **self.inputs, **folders, "out": folders[name]}

        def fill(word: str) -> str:
            return _NAME.sub(lambda found: known[found[1]], word)

        said = tuple(map(fill, shlex.split(stage.run)))
        if " ".join(said).startswith(PLAIN):
            return said
        begun = self.config if stage.config is None else stage.config
        settings = {**dict(_flat(self.set)), **dict(_flat(stage.set))}
        # A string is given as it is, everything else as TOML, which is JSON here.
        pairs = (f"{key}={fill(value) if isinstance(value, str) else _text(value)}" for key, value in settings.items())
        return (*said, *(("--config", begun) if begun else ()), *(word for pair in pairs for word in ("--set", pair)))

    def needs(self, name: str) -> tuple[str, ...]:
        """Return the stages and inputs that a stage names, each once."""
        known = {*self.stages, *self.inputs}
        return tuple(dict.fromkeys(each for each in names_in(self.stages[name]) if each in known))

    def from_stage(self, name: str) -> tuple[str, ...]:
        """Return a stage and those after it that use its result, directly or not; raise UsageError if there is none."""
        if name not in self.stages:
            raise UsageError(f"there is no stage {name}; there are {', '.join(self.stages)}")
        return tuple(each for each in self.stages if each == name or name in self.upstream(each))

    def until(self, name: str) -> tuple[str, ...]:
        """Return the stages up to one, or all of them for an empty name; raise UsageError if there is none."""
        if name and name not in self.stages:
            raise UsageError(f"there is no stage {name}; there are {', '.join(self.stages)}")
        names = tuple(self.stages)
        return names[: names.index(name) + 1] if name else names

    def upstream(self, name: str) -> frozenset[str]:
        """Return the stages whose results a stage uses, directly or not."""
        direct = frozenset(each for each in self.needs(name) if each in self.stages)
        return direct.union(*(self.upstream(each) for each in direct))


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the recipes that come with the package, by name."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.toml"))}


def load_recipe(
    named: str, changes: Sequence[str] = (), inputs: Sequence[str] = (), *, complete: bool = True
) -> Recipe:
    """Read a recipe: a TOML file, or one of the package, such as `tiny` or `recipes/tiny.toml`. `changes`: `NAME=VALUE`
    for a value, `STAGE.SETTING=VALUE` for a setting of a stage. `inputs`: `NAME=PLACE`, in place of the recipe's own.
    `complete`: refuse a recipe with an input that has no place. Raises UsageError: there is no such recipe, or a change
    names nothing of it; ConfigError: it cannot be understood."""
    file = Path(named)
    if file.suffix in {"", ".toml"} and not file.is_file() and file.parts[:-1] in {(), ("recipes",)}:
        file = shipped_recipes().get(file.stem, file)
    if not file.is_file():
        raise UsageError(f"there is no recipe {named}: give a TOML file, or one of {', '.join(shipped_recipes())}")
    recipe_of(tree := read_toml(file, named), named)  # so that changes find tables where there should be some
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes NAME=VALUE or STAGE.SETTING=VALUE, not {change!r}")
        put_setting(tree, key, _parse(text))
    for given in inputs:
        key, equals, place = given.partition("=")
        if not equals or key not in tree.get("inputs", {}):
            there = ", ".join(tree.get("inputs", {})) or "none"
            raise UsageError(f"--input takes NAME=PLACE, not {given!r}; the inputs of {named} are: {there}")
        tree["inputs"][key] = place
    recipe = recipe_of(tree, named)
    for key, place in recipe.inputs.items():
        if complete and not place:
            raise UsageError(f"{named} needs an input: --input {key}=PLACE")
    return recipe


def recipe_of(tree: Mapping[str, Any], named: str) -> Recipe:
    """Return a recipe from plain data; raise ConfigError with `named` in front."""
    try:
        return msgspec.convert(tree, Recipe)
    except (*MALFORMED, ConfigError) as error:
        raise ConfigError(f"{named}: {error}") from error


def put_setting(tree: dict[str, Any], key: str, value: Value) -> None:
    """Change a value, `STAGE.SETTING` or `STAGE.gates.NAME` of plain data; UsageError if there is none such."""
    stage, dot, setting = key.partition(".")
    if key in tree.get("values", {}):
        tree["values"][key] = value
    elif dot and stage in tree.get("stages", {}) and setting.startswith("gates."):
        tree["stages"][stage].setdefault("gates", {})[setting.removeprefix("gates.")] = value
    elif dot and stage in tree.get("stages", {}):
        settings = dict(_flat(tree["stages"][stage].get("set", {})))
        tree["stages"][stage]["set"] = {**settings, setting: value}
    else:
        values = ", ".join(tree.get("values", {})) or "none"
        raise UsageError(f"the recipe has no value and no stage for {key}; values: {values}")


def names_in(stage: RecipeStage) -> Iterator[str]:
    """Yield what a stage names: values, inputs and stages."""
    yield from _NAME.findall(stage.run)
    for _, value in _flat(stage.set):
        if isinstance(value, str):
            yield from _NAME.findall(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Value) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _parse(text: str) -> Value:
    try:
        found = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return found if isinstance(found, str | int | float | bool) else text
