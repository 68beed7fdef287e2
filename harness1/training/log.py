"""A training run in MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness1.errors import MALFORMED, InfrastructureFault, SchemaError, optional
from harness1.plain import decode_plain, secrets_of, text_digest, without_secrets
from harness1.runs.files import clear, write_atomically
from harness1.runs.journal import Journal, hold

FOLDER_TAG = "harness1.folder"  # tag of a run, by which a resumed training finds it: the digest of its folder's path


class MlflowRun:
    """A run of an experiment (`place`: `EXPERIMENT`, in the store that MLflow is set up for, or `EXPERIMENT@URI`),
    which a resumed training continues. Raise MissingExtra without mlflow; InfrastructureFault if the store fails."""

    def __init__(self, folder: Path, place: str, *, resumed: bool) -> None:
        with optional("logs", "mlflow"):
            import mlflow
        # A name may have an @ of its own; an address has a scheme.
        name, _, self._uri = re.sub(r"@(?=[\w+.-]+:)", "\0", place, count=1).partition("\0")
        tags = {FOLDER_TAG: text_digest(str(folder.resolve())), "mlflow.runName": folder.resolve().name}
        with self._explain_errors():
            self._client: Any = mlflow.MlflowClient(self._uri or None)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            mine = f"tags.`{FOLDER_TAG}` = '{tags[FOLDER_TAG]}'"
            runs = self._client.search_runs([experiment], mine, max_results=1) if resumed else []
            run = runs[0] if runs else self._client.create_run(experiment, tags=tags)
            self._id = run.info.run_id
            self._client.update_run(self._id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with self._explain_errors():
            self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, status: str) -> None:
        with self._explain_errors():
            self._client.set_terminated(self._id, status)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise InfrastructureFault(f"MLflow: {without_secrets(str(error), secrets_of(self._uri))}") from error


LOG = "log.jsonl"
VALIDATION_PREFIX = "held_out/"  # of the names of validation metrics, in a log and for a `StepListener`
StepListener = Callable[[int, int, Mapping[str, float]], None]  # step, steps, values; first the last completed step


class Trackers(NamedTuple):
    """Where else a training run is logged; empty for nowhere."""

    tensorboard: bool = False
    wandb: str = ""  # a project of Weights & Biases
    mlflow: str = ""  # an experiment, `NAME` or `NAME@URI`


NO_TRACKERS = Trackers()


class TrainLog(AbstractContextManager["TrainLog"]):
    """Appends to `log.jsonl`, which one process at a time holds; without a folder, it writes nothing. A resumed run
    repeats the steps after `after` (-1 for a run that begins), so their old lines are removed. Raise UsageError if
    another process is writing to the folder, or this one cannot; MissingExtra if a tracker is not installed."""

    def __init__(self, folder: Path | None, after: int = -1, trackers: Trackers = NO_TRACKERS) -> None:
        self._logs: list[Callable[[Mapping[str, float], int], object]] = []
        self._ends: list[Callable[[str], object]] = []
        if folder is None:
            return
        with Journal(folder, LOG):
            if trackers.tensorboard:
                with optional("logs", "tensorboard"):
                    from torch.utils.tensorboard import SummaryWriter
                events: Any = SummaryWriter(folder / "tensorboard", purge_step=after + 1)
                self._logs.append(lambda values, step: [events.add_scalar(*each, step) for each in values.items()])
                self._ends.append(lambda _: events.close())
            if trackers.wandb:
                with optional("logs"):
                    import wandb
                name = text_digest(str(folder.resolve()))  # a resumed folder continues its run
                project = wandb.init(project=trackers.wandb, dir=folder, id=name, resume="allow")
                self._logs.append(lambda values, step: project.log(dict(values), step=step))
                self._ends.append(lambda _: project.finish())
            if trackers.mlflow:
                run = MlflowRun(folder, trackers.mlflow, resumed=after >= 0)
                self._logs.append(run.log)
                self._ends.append(run.finish)
            kept = [line for line, values in _read(folder / LOG) if values["step"] <= after]
            write_atomically(folder / LOG, b"".join(line + b"\n" for line in kept))
            file = Journal(folder, LOG)
            self._logs.insert(0, lambda values, step: file.write(msgspec.json.encode({"step": step, **values})))
            self._ends.insert(0, lambda _: file.close())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for log in self._logs:
            log(values, step)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for end in self._ends:
            end("FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED")


def clear_training(folder: Path, verb: str) -> None:
    """Remove an earlier training; UsageError if the folder holds something else, or another process writes to it."""
    with hold(folder, LOG):
        clear(folder, verb, "*")


def validation_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the validation metrics among some values, without their prefix."""
    begin = len(VALIDATION_PREFIX)
    return {name[begin:]: value for name, value in values.items() if name.startswith(VALIDATION_PREFIX)}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, oldest first, without a torn last one; SchemaError if one is no object with a step."""
    return [values for _, values in _read(folder / LOG)]


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            values = msgspec.convert(decode_plain(line), dict[str, Any])
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: not a line of a training's log: {error}") from error
        if not isinstance(values.get("step"), int):
            raise SchemaError(f"{path}:{number}: not a line of a training's log: it has no step")
        yield line, values
