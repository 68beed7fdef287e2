"""The tensors of a training run on disk (`torch.distributed.checkpoint`): any number of processes reads what any number
wrote."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness1.model_folder import first_line
from harness1.training.process_group import ALONE, ProcessGroup, Unanimous

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = "tensors"
"""Folders of tensors are called `tensors-1`, `tensors-2` and so on."""


def save_tensors(root: Path, tensors: Mapping[str, Tensor], group: ProcessGroup = ALONE) -> str:
    """Write tensors, each process its shards, into a new folder within `root`, and return the folder's name.

    The folder of the save before is kept, since the caller has yet to replace its reference to it; older ones are
    removed.

    Raises:
        Unanimous: the disk is full, or the folder cannot be written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _told(f"cannot write the state of training to {root}: {{}}"):
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

    with _told(f"{folder} is damaged: begin again with --force"):
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
def _told(message: str) -> Iterator[None]:
    """Raise `Unanimous` with a message, into which the first line of the cause is put."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process has none
            yield
    except CheckpointException as error:
        causes: list[Any] = [cause for cause, _ in error.failures.values()]
        raise Unanimous(message.format(first_line(causes[0]))) from error
