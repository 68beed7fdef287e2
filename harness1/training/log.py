"""The log of a training run: lines of JSON, and on request TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness1.errors import MALFORMED, SchemaError, optional
from harness1.hashing import text_digest
from harness1.runs.files import clear, write_atomically
from harness1.runs.journal import Journal, held
from harness1.training.mlflow_run import MlflowRun

LOG = "log.jsonl"
VALIDATION_PREFIX = "held_out/"
"""Prefix of the names of validation metrics, in a log and in the values given to a `StepListener`."""
StepListener = Callable[[int, int, Mapping[str, float]], None]
"""Called with the step, the number of steps and the measured values; first with the last completed step, or 0."""


class Trackers(NamedTuple):
    """Where else a training run is logged."""

    tensorboard: bool = False
    wandb: str = ""
    """A project of Weights & Biases; empty for none."""
    mlflow: str = ""
    """An experiment of MLflow, `NAME` or `NAME@URI`; empty for none."""


NO_TRACKERS = Trackers()


class TrainLog(AbstractContextManager["TrainLog"]):
    """Appends to `log.jsonl`, which one process at a time holds. A resumed run repeats the steps after `after`, so
    their old lines are removed.

    Args:
        folder: None for a process that must not write.
        after: -1 for a run that begins.

    Raises:
        UsageError: another process is writing to the folder, or this one cannot.
        MissingExtra: TensorBoard, wandb or mlflow is not installed.
        InfrastructureFault: MLflow's store cannot be opened.
    """

    def __init__(self, folder: Path | None, after: int = -1, trackers: Trackers = NO_TRACKERS) -> None:
        self._file: Journal | None = None
        self._events: Any = None
        self._project: Any = None
        self._run: MlflowRun | None = None
        if folder is None:
            return
        with Journal(folder, LOG):
            self._events = _open_tensorboard(folder / "tensorboard", after) if trackers.tensorboard else None
            self._project = _open_wandb(folder, trackers.wandb) if trackers.wandb else None
            self._run = MlflowRun(folder, trackers.mlflow, resumed=after >= 0) if trackers.mlflow else None
            kept = [line for line, values in _read(folder / LOG) if values["step"] <= after]
            write_atomically(folder / LOG, b"".join(line + b"\n" for line in kept))
            self._file = Journal(folder, LOG)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line with the step and its values."""
        if self._file is None:
            return
        self._file.write(msgspec.json.encode({"step": step, **values}))
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        if self._project is not None:
            self._project.log(dict(values), step=step)
        if self._run is not None:
            self._run.log(values, step)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()
        if self._project is not None:
            self._project.finish()
        if self._run is not None:
            self._run.finish("FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED")


def clear_training(folder: Path, verb: str) -> None:
    """Remove an earlier training.

    Raises:
        UsageError: the folder holds something else, another process is writing to it, or it cannot be cleared.
    """
    with held(folder, LOG):
        clear(folder, verb, "*")


def validation_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the validation metrics among some values, without their prefix."""
    prefix = VALIDATION_PREFIX
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a training run, oldest first, without a torn last one.

    Raises:
        SchemaError: a line is no object with a step.
    """
    return [values for _, values in _read(folder / LOG)]


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: not a line of a training's log: {error}") from error
        if not isinstance(values.get("step"), int):
            raise SchemaError(f"{path}:{number}: not a line of a training's log: it has no step")
        yield line, values


def _open_tensorboard(folder: Path, after: int) -> Any:
    with optional("logs", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(folder, purge_step=after + 1)


def _open_wandb(folder: Path, project: str) -> Any:
    with optional("logs"):
        import wandb
    # A resumed folder continues its run.
    return wandb.init(project=project, dir=folder, id=text_digest(str(folder.resolve())), resume="allow")
