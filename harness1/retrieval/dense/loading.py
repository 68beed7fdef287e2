"""Loads models of sentence-transformers quietly, on a set number of threads, and reports failures in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness1.config import Machine
from harness1.errors import MissingExtra, UsageError, optional
from harness1.model_folder import first_line, no_progress_bars, refusing


@contextmanager
def loading(folder: Path, kind: str, machine: Machine) -> Iterator[None]:
    """Load a model within this context quietly, on a set number of threads, and report failures in one line.

    Raises:
        UsageError: the folder is not such a model, or torch lacks the device.
        MissingExtra: sentence-transformers is not installed.
    """
    with optional("dense", "sentence-transformers"):
        import torch

        if machine.threads:
            torch.set_num_threads(machine.threads)
    with refusing(f"{folder} is not a {kind} that sentence-transformers can load"), no_progress_bars():
        try:
            yield
        except ModuleNotFoundError as error:
            raise MissingExtra("sentence-transformers", "dense") from error
        except RecursionError:
            raise
        except (RuntimeError, AssertionError) as error:  # what torch raises for the different kinds of device
            device = machine.device or "that torch prefers"
            raise UsageError(f"{folder} does not load on the device {device!r}: {first_line(error)}") from error
