"""What training writes down as it goes: lines of JSON, and if asked for TensorBoard and Weights & Biases."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from harness1.errors import optional
from harness1.hashing import text_digest
from harness1.runs.files import write_atomically

LOG = "log.jsonl"
VALIDATION_PREFIX = "held_out/"
"""What the names of what a look at held-out rows or tasks measures begin with, in a log and before a listener."""
StepListener = Callable[[int, int, Mapping[str, float]], None]
"""Called with the step, how many there are, and what was measured; first with the one that training begins behind."""


class TrainLog:
    """Appends to `log.jsonl`. A resumed run writes its first lines again: those behind `after` are taken out.

    Args:
        folder: None of a process that is not to write.
        after: the step that training goes on from.
        tensorboard: also write event files into `tensorboard/`.
        wandb: the project of Weights & Biases; empty: none.

    Raises:
        MissingExtra: what was asked for is not installed.
    """

    def __init__(self, folder: Path | None, after: int = 0, *, tensorboard: bool = False, wandb: str = "") -> None:
        self._file: io.FileIO | None = None
        self._events: Any = None
        self._project: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._events = _open_tensorboard(folder / "tensorboard", after) if tensorboard else None
        self._project = _open_wandb(folder, wandb) if wandb else None
        path = folder / LOG
        kept = [line for line in _lines(path) if after > 0 and _step(line) <= after]
        write_atomically(path, b"".join(line + b"\n" for line in kept))
        self._file = io.FileIO(path, "ab")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line: the step and some numbers."""
        if self._file is None:
            return
        self._file.write(msgspec.json.encode({"step": step, **values}) + b"\n")
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        if self._project is not None:
            self._project.log(dict(values), step=step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()
        if self._project is not None:
            self._project.finish()

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def validation_values(values: Mapping[str, float]) -> dict[str, float]:
    """What a look at held-out rows or tasks measured; empty where the values are of a step."""
    return {
        name.removeprefix(VALIDATION_PREFIX): value
        for name, value in values.items()
        if name.startswith(VALIDATION_PREFIX)
    }


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a training run, oldest first; a torn last one is left out."""
    return [msgspec.json.decode(line) for line in _lines(folder / LOG)]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _step(line: bytes) -> int:
    step: int = msgspec.json.decode(line)["step"]
    return step


def _open_tensorboard(folder: Path, after: int) -> Any:
    with optional("logs", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(folder, purge_step=after + 1)


def _open_wandb(folder: Path, project: str) -> Any:
    with optional("logs"):
        import wandb
    # One folder is one run, also when it is resumed.
    return wandb.init(project=project, dir=folder, id=text_digest(str(folder.resolve())), resume="allow")
