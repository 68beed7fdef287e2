"""The card of a trained model: its environment and chat format, and what it was trained from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config, read_recorded
from harness1.config.env import Env, read_env
from harness1.config.settings import differences
from harness1.env.environment import env_hash
from harness1.errors import ConfigError
from harness1.models.spec import ModelSpec, is_model
from harness1.records import Record
from harness1.runs.files import read_record

CHECKPOINT = "checkpoint.json"
SHOWN = 6  # most settings that a message names


class Checkpoint(Record, kw_only=True):
    """The card beside the weights of a model trained here: its format, tokenizer and environment, the hashes of its
    base and data, the settings of the trainer, and metrics on held-out tasks."""

    format: str
    counter: str
    env: dict[str, Any]
    env_hash: str
    base: str
    adapter_base: str = ""
    """The hash of the model whose weights the adapters in the folder stand beside; empty for whole weights."""
    dataset: dict[str, Any] = {}
    train: dict[str, Any] = {}
    step: int = 0
    metrics: dict[str, float] = {}
    origins: tuple[str, ...] = ()
    """What the model was made of: the datasets, and the model that training began with (`data.origins`)."""
    remote: str = ""  # the name under which a training service keeps the weights, which are then not in the folder


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the card in a model's folder, None if it was not trained here; raise SchemaError if it is damaged."""
    return read_record(folder / CHECKPOINT, Checkpoint, "the card of a checkpoint")


def format_of(folder: Path, config: Config) -> str:
    """Return the chat format of a model: the one it was trained for, unless another is configured. Raise ConfigError if
    it was trained for another environment or format, and `machine.model.foreign` is off; or SchemaError."""
    card, configured = read_checkpoint(folder), config.policy.format
    if card is None:
        return configured
    chosen = card.format if configured == "auto" else configured
    if config.machine.model.foreign:
        return chosen
    current, trained = read_recorded(config.env.plain()), read_recorded(card.env)
    differing = [] if chosen == card.format else [f"policy.format={chosen} (trained: {card.format})"]
    if env_hash(config.env) != card.env_hash:
        differing += [
            f"{name}={ours} (trained: {theirs})" for name, ours, theirs in differences(current, trained, "env.")
        ] or ["the wording of the prompt or of a tool"]
    if differing:
        raise ConfigError(
            f"{folder} was trained for another environment, which differs in {_name_first(differing)}. Without --config"
            " and --set of these, its own is used; to use this one: --set machine.model.foreign=true"
        )
    return chosen


def environment_of(model: str, config: Config) -> dict[str, Any] | None:
    """Return the settings of the environment that a model, by its name such as `hf:PATH` or its path, was trained in;
    None if it was not trained here, or is no folder here. Raise UsageError for a name of no form, SchemaError, or
    ConfigError if this version lacks those settings and `machine.model.foreign` is off."""
    spec = ModelSpec.read(model) if is_model(model) else ModelSpec("hf", model, None)
    place = (spec.url and config.machine.model.tokenizer) or spec.model
    card = read_checkpoint(Path(place))
    if card is None:
        return None
    try:
        read_env(card.env)
    except (msgspec.ValidationError, ConfigError) as error:
        if config.machine.model.foreign:
            return None
        raise ConfigError(
            f"{place} was trained by another version, with other settings of its environment ({error}); to use it in"
            " the one configured: --set machine.model.foreign=true"
        ) from error
    return read_recorded(card.env)


def describe_environment(model: str, without: Env, env: Env) -> str:
    """Return what differs in the environment of a checkpoint from the one that a command would take place in."""
    ours: dict[str, Any] = msgspec.to_builtins(env)
    changed = [f"{name}={value}" for name, value, _ in differences(ours, msgspec.to_builtins(without), "env.")]
    return f"env of {model.partition(':')[2] or model}: {_name_first(changed)}"


def _name_first(settings: list[str]) -> str:
    rest = len(settings) - SHOWN
    return ", ".join(settings[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
