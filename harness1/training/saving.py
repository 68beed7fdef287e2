"""The tensors of a training run on disk (`torch.distributed.checkpoint`): any number of processes reads what any number
wrote."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from harness1.config import Lora, Train
from harness1.errors import MALFORMED, UsageError
from harness1.model_folder import ADAPTER_CONFIG, base_folder, first_line, folder_hash, holds_adapters, no_progress_bars
from harness1.models.adapters import Adapters, read_adapters, write_adapters
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from harness1.runs.files import write_json
from harness1.training.process_group import ALONE, ProcessGroup, Unanimous

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from harness1.models.adapters import Weights


TENSORS = "tensors"
"""Folders of tensors are called `tensors-1`, `tensors-2` and so on."""


def save_tensors(root: Path, tensors: Mapping[str, Tensor], group: ProcessGroup = ALONE) -> str:
    """Write tensors, each process its shards, into a new folder within `root`, and return the folder's name.

    The folder of the save before is kept, since the caller has yet to replace its reference to it; older ones are
    removed. Raise Unanimous if the disk is full, or the folder cannot be written."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _explain_failure(f"cannot write the state of training to {root}: {{}}"):
        kept = _numbers(root)[-1:]
        group.wait()  # until all have looked
        if group.leads:
            forget_tensors(root, *map(_name, kept))
        name = _name(max(kept, default=0) + 1)
        save(dict(tensors), storage_writer=FileSystemWriter(root / name), no_dist=group.size == 1)
    return name


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup = ALONE) -> None:
    """Fill tensors in place with those of the same names in a folder that `save_tensors` wrote; raise `Unanimous` if it
    is damaged."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _explain_failure(f"{folder} is damaged: begin again with --force"):
        load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=group.size == 1)


def forget_tensors(root: Path, *kept: str) -> None:
    """Remove all folders of tensors but some."""
    for number in _numbers(root):
        if _name(number) not in kept:
            shutil.rmtree(root / _name(number), ignore_errors=True)


def _name(number: int) -> str:
    return f"{TENSORS}-{number}"


def _numbers(root: Path) -> list[int]:
    found = (path.name.removeprefix(f"{TENSORS}-") for path in root.glob(f"{TENSORS}-*"))
    return sorted(int(number) for number in found if number.isdecimal())


@contextmanager
def _explain_failure(message: str) -> Iterator[None]:
    """Raise `Unanimous` with a message, into which the first line of the cause is put."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process has none
            yield
    except CheckpointException as error:
        causes: list[Any] = [cause for cause, _ in error.failures.values()]
        raise Unanimous(message.format(first_line(causes[0]))) from error


State = TypeVar("State")
WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth")
"""Endings of files that are not copied from the base model."""
NOT_OF_A_MODEL = frozenset(
    {CHECKPOINT, ADAPTER_CONFIG, "README.md", "stage.json", "data_card.json", "data_README.md", "log.jsonl"}
)
"""Our own files, which describe the base and not the new model."""


def write_model(out: Path, model: PreTrainedModel, weights: Weights, base: Path, card: Checkpoint) -> Checkpoint:
    """Write the weights, or only the adapters where a model has them, as peft does; with them the tokenizer and
    templates of the base model, and the card. Return the card as written.

    A reader finds the old model or the new one: the card is written last, right after the weights. Raise UsageError if
    the disk is full, or the folder cannot be written.

    Args:
        weights: as `Trainer.weights` returns them.
        base: the folder of the model that training began with; adapters belong to its whole weights.
    """
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


def read_weights(folder: Path) -> Weights:
    """Return the weights of a checkpoint, or its adapters, as a reader of the folder gets them, in float32 on the CPU;
    raise UsageError or MissingExtra as `read_adapters` and `load_causal_model` does."""
    if holds_adapters(folder):
        return read_adapters(folder)
    return dict(load_causal_model(folder, "cpu", "float32").state_dict())


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


def load_state(path: Path, kind: type[State]) -> State | None:
    """Return the state in a file as the type that the training keeps it in, or None if there is none; raise UsageError
    if the file is damaged, or was written by a version of harness1 that kept another state."""
    state = read_state(path)
    try:
        return None if state is None else msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path} was written by another version of harness1 ({error}): go on with that one, or begin again with"
            " --force"
        ) from error


def disk_bytes(base: Path, train: Train) -> int:
    """Return the most bytes on disk that a training takes: two checkpoints and two states, while the later of each is
    being written. A checkpoint holds what is trained in float32, and a state its two moments too. Raise UsageError
    if a file of the base is damaged."""
    shapes = _shapes(base)
    trained = sum(_adapter_numbers(*each, train.lora) if train.lora.rank else prod(each[1]) for each in shapes)
    return trained * 4 * 2 * (1 + 3)


def parameters_of(folder: Path) -> int:
    """Return the number of parameters in the safetensors of a model or of the base of adapters, from the headers of the
    files; raise UsageError if a file is damaged."""
    return sum(prod(shape) for _, shape in _shapes(folder))


def _shapes(folder: Path) -> list[tuple[str, list[int]]]:
    """Return the names and shapes of the tensors; raise as `parameters_of`."""
    found: list[tuple[str, list[int]]] = []
    for path in base_folder(folder).glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__", None)
            found += [(name, [int(size) for size in each["shape"]]) for name, each in header.items()]
        except (OSError, *MALFORMED, KeyError, TypeError, AttributeError, MemoryError) as error:
            raise UsageError(f"{path} is damaged: {first_line(error)}") from error
    return found


def _adapter_numbers(name: str, shape: Sequence[int], lora: Lora) -> int:
    """Return how many numbers the adapter of a tensor has, at most: those of embeddings, head and routers have none."""
    if (len(shape) == 2 and name.endswith(".weight")) or (len(shape) == 3 and lora.experts):
        return lora.rank * prod(shape[:-2]) * sum(shape[-2:])
    return 0
