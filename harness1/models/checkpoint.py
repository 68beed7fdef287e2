"""The card of a trained model: which environment and format it learned, and from what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config
from harness1.env.environment import env_hash
from harness1.errors import ConfigError, SchemaError
from harness1.records import Record
from harness1.settings import differences

CHECKPOINT = "checkpoint.json"
SHOWN = 6
"""Settings that a refusal names."""


class Checkpoint(Record, kw_only=True):
    """What stands beside the weights of a model that was trained here."""

    format: str
    """The name of the chat format that it speaks."""
    counter: str
    """The hash of format and tokenizer together."""
    env: dict[str, Any]
    """The environment in which it learned, whole."""
    env_hash: str
    base: str
    """The hash of the model that training began with."""
    dataset: dict[str, Any] = {}
    """What it was trained on, by hashes."""
    train: dict[str, Any] = {}
    """The settings of the trainer."""
    step: int = 0
    metrics: dict[str, float] = {}
    """On held-out tasks, when these weights were written."""


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The card of a model's folder; None for a model that was not trained here.

    Raises:
        SchemaError: the card is damaged.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"{path} is not the card of a checkpoint: {error}") from error


def format_of(folder: Path, config: Config) -> str:
    """The chat format that a model is asked in: that which it was trained for, unless another is demanded.

    Raises:
        ConfigError: it was trained for another environment or format, and `machine.model.foreign` is off.
        SchemaError: its card is damaged.
    """
    card, asked = read_checkpoint(folder), config.policy.format
    if card is None:
        return asked
    known = card.format if asked == "auto" else asked
    if config.machine.model.foreign:
        return known
    differing = [] if known == card.format else [f"policy.format={known} (trained: {card.format})"]
    if env_hash(config.env) != card.env_hash:
        found: dict[str, Any] = msgspec.to_builtins(config.env)
        differing += [
            f"{name}={ours} (trained: {theirs})" for name, ours, theirs in differences(found, card.env, "env.")
        ] or ["the words of the prompt or of a tool"]
    if differing:
        shown = ", ".join(differing[:SHOWN]) + (f" and {len(differing) - SHOWN} more" if differing[SHOWN:] else "")
        raise ConfigError(
            f"{folder} was trained for another environment; it differs in {shown}. Give the configuration that it was "
            "trained with, or say that you mean it: --set machine.model.foreign=true"
        )
    return known
