"""The environment that a checkpoint carries, for commands that are given no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config, recorded_without
from harness1.config.env import Env
from harness1.config.settings import differences
from harness1.errors import ConfigError
from harness1.models.checkpoint import read_checkpoint, shown
from harness1.models.spec import ModelSpec, is_model


def environment_of(model: str, config: Config) -> dict[str, Any] | None:
    """Return the settings of the environment that a model was trained in; None if it was not trained here, or is not a
    folder of this machine.

    Args:
        model: the name of a model such as `hf:PATH`, or a path; other policies have no environment.

    Raises:
        UsageError: the name of a model has none of its forms.
        SchemaError: the card of the checkpoint is damaged.
        ConfigError: this version does not have those settings, and `machine.model.foreign` is off.
    """
    asked = ModelSpec.read(model) if is_model(model) else ModelSpec("hf", model, None)
    place = (asked.url and config.machine.model.tokenizer) or asked.model
    card = read_checkpoint(Path(place))
    if card is None:
        return None
    env = recorded_without(card.env)
    try:
        msgspec.convert(env, Env)
    except msgspec.ValidationError as error:
        if config.machine.model.foreign:
            return None
        raise ConfigError(
            f"{place} was trained by another version, with other settings of its environment ({error}); to use it in"
            " the one configured: --set machine.model.foreign=true"
        ) from error
    return env


def told(model: str, without: Env, env: Env) -> str:
    """Return what to tell the user whose command takes place in the environment of a checkpoint: what differs from the
    one that it would take place in otherwise."""
    ours: dict[str, Any] = msgspec.to_builtins(env)
    changed = [f"{name}={value}" for name, value, _ in differences(ours, msgspec.to_builtins(without), "env.")]
    return f"env of {model.partition(':')[2] or model}: {shown(changed)}"
