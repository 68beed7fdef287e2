"""A training run in MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness1.errors import InfrastructureFault, optional
from harness1.hashing import text_digest
from harness1.redaction import secrets_of, without_secrets

FOLDER_TAG = "harness1.folder"
"""Tag of a run, by which a resumed training finds it: the digest of its folder's path."""


class MlflowRun:
    """A run of an experiment. A resumed training continues its folder's run, and logs what it repeats again.

    Args:
        folder: the folder of the training.
        place: `EXPERIMENT`, in the store that MLflow is set up for, or `EXPERIMENT@URI`.

    Raises:
        MissingExtra: mlflow is not installed.
        InfrastructureFault: the store cannot be opened.
    """

    def __init__(self, folder: Path, place: str, *, resumed: bool) -> None:
        with optional("logs", "mlflow"):
            import mlflow
        # A name may have an @ of its own; an address has a scheme.
        name, _, self._uri = re.sub(r"@(?=[\w+.-]+:)", "\0", place, count=1).partition("\0")
        tags = {FOLDER_TAG: text_digest(str(folder.resolve())), "mlflow.runName": folder.resolve().name}
        with self._told():
            self._client: Any = mlflow.MlflowClient(self._uri or None)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            mine = f"tags.`{FOLDER_TAG}` = '{tags[FOLDER_TAG]}'"
            runs = self._client.search_runs([experiment], mine, max_results=1) if resumed else []
            run = runs[0] if runs else self._client.create_run(experiment, tags=tags)
            self._id = run.info.run_id
            self._client.update_run(self._id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step; raise InfrastructureFault if the store fails."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with self._told():
            self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        with self._told():
            self._client.set_terminated(self._id, status)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn an error of MLflow into a fault, without the secrets in its address."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise InfrastructureFault(f"MLflow: {without_secrets(str(error), secrets_of(self._uri))}") from error
