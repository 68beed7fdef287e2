"""The tensors of a training run on disk: any number of processes reads what any number wrote."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from harness1.config import Train
from harness1.errors import MALFORMED, UsageError
from harness1.model_folder import ADAPTER_CONFIG, base_folder, first_line, folder_hash, holds_adapters, no_progress_bars
from harness1.models.adapters import Adapters, write_adapters
from harness1.models.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from harness1.runs.files import write_json
from harness1.training.process_group import ALONE, ProcessGroup, Unanimous

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from harness1.models.adapters import Weights


def save_tensors(root: Path, tensors: Mapping[str, Tensor], group: ProcessGroup = ALONE) -> str:
    """Write tensors, each process its shards, into a new folder within `root`, and return its name. The save before is
    kept, since the caller has yet to replace its reference to it. Raise Unanimous if the folder cannot be written."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _explain_failure(f"cannot write the state of training to {root}: {{}}"):
        last = max(_numbers(root), default=0)
        group.wait()  # until all have looked
        if group.leads:
            forget_tensors(root, f"tensors-{last}")
        name = f"tensors-{last + 1}"
        save(dict(tensors), storage_writer=FileSystemWriter(root / name), no_dist=group.size == 1)
    return name


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup = ALONE) -> None:
    """Fill tensors in place with those that `save_tensors` wrote to a folder; raise Unanimous if it is damaged."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _explain_failure(f"{folder} is damaged: begin again with --force"):
        load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=group.size == 1)


def forget_tensors(root: Path, kept: str) -> None:
    """Remove all folders of tensors but one."""
    for number in _numbers(root):
        if f"tensors-{number}" != kept:
            shutil.rmtree(root / f"tensors-{number}", ignore_errors=True)


def _numbers(root: Path) -> list[int]:
    found = (path.name.removeprefix("tensors-") for path in root.glob("tensors-*"))
    return [int(number) for number in found if number.isdecimal()]


@contextmanager
def _explain_failure(message: str) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process has none
            yield
    except CheckpointException as error:
        cause: Any = next(iter(error.failures.values()))[0]
        raise Unanimous(message.format(first_line(cause))) from error


State = TypeVar("State")
WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth")
CARDS = {CHECKPOINT, ADAPTER_CONFIG, "README.md", "stage.json", "data_card.json", "data_README.md", "log.jsonl"}
"""Our own files, which describe the base and not the new model."""


def write_model(out: Path, model: PreTrainedModel, weights: Weights, base: Path, card: Checkpoint) -> Checkpoint:
    """Write the weights, or only the adapters, as peft does, with the tokenizer and templates of `base`, the model that
    training began with, and the card, which is returned. A reader finds the old model or the new one: the card is
    written last. Raise UsageError if the folder cannot be written."""
    from safetensors import SafetensorError

    fresh = out / ".writing"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        copy_beside_weights(base, fresh)
        if isinstance(weights, Adapters):
            write_adapters(fresh, weights, base_folder(base))
            card = msgspec.structs.replace(card, adapter_base=hash_of_base(base, card))
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


def hash_of_base(base: Path, card: Checkpoint) -> str:
    """Return the hash of the weights that adapters stand beside, as far as possible from cards: files are large."""
    if not holds_adapters(base):
        return card.base
    begun = read_checkpoint(base)
    return (begun.adapter_base if begun else "") or folder_hash(base_folder(base))


def copy_beside_weights(base: Path, out: Path) -> None:
    """Copy the files of a model's folder other than weights and our own: tokenizer, templates, licence."""
    out.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name not in CARDS:
            shutil.copyfile(path, out / path.name)


def write_card(out: Path, card: Checkpoint) -> None:
    """Write `checkpoint.json`, which makes the folder a checkpoint."""
    write_json(out / CHECKPOINT, card)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state to resume training from, atomically; UsageError if the disk is full or the folder read-only."""
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


def load_state(path: Path, kind: type[State]) -> State | None:
    """Return the state that `write_state` wrote as a type; UsageError if it is damaged, or of another version."""
    import torch

    if not path.is_file():
        return None
    try:
        return msgspec.convert(torch.load(path, map_location="cpu", weights_only=True), kind)
    except msgspec.ValidationError as error:
        other = f"{path} was written by another version of harness1 ({error})"
        raise UsageError(f"{other}: go on with that one, or begin again with --force") from error
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, UnpicklingError) as error:
        raise UsageError(f"{path} is damaged: begin again with --force") from error


def disk_bytes(base: Path, train: Train) -> int:
    """Return the most bytes on disk that a training takes: two checkpoints and two states. A checkpoint holds what is
    trained in float32, and a state its two moments too. An adapter has `rank` numbers for each row and column, at most:
    those of embeddings, head and routers have none. Raise UsageError if a file of the base is damaged."""
    trained, lora, shapes = 0, train.lora, list[tuple[str, list[int]]]()
    for path in base_folder(base).glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__", None)
            shapes += [(name, [int(size) for size in each["shape"]]) for name, each in header.items()]
        except (OSError, *MALFORMED, KeyError, TypeError, AttributeError, MemoryError) as error:
            raise UsageError(f"{path} is damaged: {first_line(error)}") from error
    for name, shape in shapes:
        if not lora.rank:
            trained += prod(shape)
        elif (len(shape) == 2 and name.endswith(".weight")) or (len(shape) == 3 and lora.experts):
            trained += lora.rank * prod(shape[:-2]) * sum(shape[-2:])
    return trained * 4 * 2 * (1 + 3)
