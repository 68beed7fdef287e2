"""Writing a trained model: a plain folder that everything which loads models can load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.errors import UsageError
from harness1.policy.checkpoint import CHECKPOINT, Checkpoint
from harness1.retrieval.model_folder import no_progress_bars
from harness1.stage import write_atomically
from harness1.train.lora import merged_state

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth")
"""Endings of what is not copied from the model that training began with."""


def write_model(out: Path, model: PreTrainedModel, base: Path, card: Checkpoint) -> None:
    """Write weights (adapters merged), and beside them the tokenizer and templates of the base model, and the card.

    A reader finds the old model or the new one: weights come last but for the card, which vouches for them.

    Raises:
        OSError: the folder cannot be written.
    """
    fresh = out / ".writing"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name not in NOT_OF_A_MODEL:
            shutil.copyfile(path, fresh / path.name)
    with no_progress_bars():
        model.save_pretrained(fresh, state_dict=dict(_stored(merged_state(model))))
    (out / CHECKPOINT).unlink(missing_ok=True)
    for path in sorted(fresh.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name)):
        path.replace(out / path.name)
    fresh.rmdir()
    write_card(out, card)


def write_card(out: Path, card: Checkpoint) -> None:
    """Write `checkpoint.json`: from here on the folder is a checkpoint."""
    write_atomically(out / CHECKPOINT, msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")


NOT_OF_A_MODEL = frozenset({CHECKPOINT, "stage.json", "card.json", "README.md", "log.jsonl"})
"""Files of ours, which speak of the base and not of what was made of it."""


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write what training goes on from, in one atomic step."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}")
    torch.save(dict(state), fresh)
    fresh.replace(path)


def read_state(path: Path) -> dict[str, Any] | None:
    """What `write_state` wrote; None if it never did.

    Raises:
        UsageError: the file is damaged.
    """
    import pickle

    import torch

    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged: begin again with --force") from error
    return found


def refuse_full_disk(out: Path, needed: int) -> None:
    """
    Raises:
        UsageError: the disk has less room than so many bytes.
    """
    home = next(place for place in (out, *out.absolute().parents) if place.exists())
    free = shutil.disk_usage(home).free
    if free < needed:
        raise UsageError(f"{out} needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")


def _stored(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Detached values; of names that share one, such as a tied head, all are kept: the writer knows them."""
    return {name: value.detach() for name, value in state.items()}
