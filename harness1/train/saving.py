"""Trained models as plain folders, and the state of a training run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.errors import MALFORMED, UsageError
from harness1.model_folder import ADAPTER_CONFIG, base_folder, first_line, folder_hash, holds_adapters, no_progress_bars
from harness1.models.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from harness1.models.transformers.adapter_files import write_adapters
from harness1.models.transformers.adapters import Adapters
from harness1.runs.files import write_json

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from harness1.models.transformers.adapters import Weights

WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth")
"""Endings of files that are not copied from the base model."""
NOT_OF_A_MODEL = frozenset(
    {CHECKPOINT, ADAPTER_CONFIG, "README.md", "stage.json", "data_card.json", "data_README.md", "log.jsonl"}
)
"""Our own files, which describe the base and not the new model."""


def write_model(out: Path, model: PreTrainedModel, weights: Weights, base: Path, card: Checkpoint) -> Checkpoint:
    """Write the weights, or only the adapters where a model has them, as peft does; with them the tokenizer and
    templates of the base model, and the card. Return the card as written.

    A reader finds the old model or the new one: the card is written last, right after the weights.

    Args:
        weights: as `Trainer.weights` returns them.
        base: the folder of the model that training began with; adapters belong to its whole weights.

    Raises:
        UsageError: the disk is full, or the folder cannot be written.
    """
    from safetensors import SafetensorError

    fresh = out / ".writing"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        copy_beside_weights(base, fresh)
        if isinstance(weights, Adapters):
            write_adapters(fresh, weights, base_folder(base))
            card = msgspec.structs.replace(card, adapter_base=_hash_of_base(base, card))
        else:
            save_whole(fresh, model, weights)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise UsageError(f"cannot write the model to {out}: {first_line(error)}") from error
    (out / CHECKPOINT).unlink(missing_ok=True)
    for path in sorted(fresh.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name)):
        path.replace(out / path.name)
    fresh.rmdir()
    write_card(out, card)
    return card


def save_whole(folder: Path, model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Write the configuration and whole weights of a model; raise OSError or SafetensorError if there is no room."""
    with no_progress_bars():
        # A tensor with several names, such as a tied head, keeps them all: the writer resolves them.
        model.save_pretrained(folder, state_dict={name: value.detach() for name, value in state.items()})


def _hash_of_base(base: Path, card: Checkpoint) -> str:
    """Return the hash of the weights that adapters stand beside, as far as possible from cards: files are large."""
    if not holds_adapters(base):
        return card.base
    begun = read_checkpoint(base)
    return (begun.adapter_base if begun else "") or folder_hash(base_folder(base))


def copy_beside_weights(base: Path, out: Path) -> None:
    """Copy the files of a model's folder other than weights (tokenizer, templates, licence), without our own; raise
    OSError if the folder cannot be written."""
    out.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name not in NOT_OF_A_MODEL:
            shutil.copyfile(path, out / path.name)


def write_card(out: Path, card: Checkpoint) -> None:
    """Write `checkpoint.json`, which makes the folder a checkpoint."""
    write_json(out / CHECKPOINT, card)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state to resume training from, atomically; raise UsageError if the disk is full, or the folder cannot
    be written."""
    import torch

    fresh = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError if the disk is full
        fresh.unlink(missing_ok=True)
        raise UsageError(f"cannot write the state of training to {path}: {first_line(error)}") from error


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the state that `write_state` wrote, or None if there is none; raise UsageError if the file is damaged."""
    import pickle

    import torch

    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged: begin again with --force") from error
    return state


def parameters_of(folder: Path) -> int:
    """Return the number of parameters in the safetensors of a model or of the base of adapters, from the headers of the
    files; raise UsageError if a file is damaged."""
    total = 0
    for path in base_folder(folder).glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
            total += sum(prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
        except (OSError, *MALFORMED, KeyError, TypeError, AttributeError, MemoryError) as error:
            raise UsageError(f"{path} is damaged: {first_line(error)}") from error
    return total
