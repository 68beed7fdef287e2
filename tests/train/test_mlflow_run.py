"""A training log in a real store of MLflow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness1.errors import InfrastructureFault, MissingExtra
from harness1.training.log import Trackers, TrainLog, read_log

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.chdir(tmp_path_factory.mktemp("mlflow"))
        yield "sqlite:///mlflow.db"


@pytest.fixture
def students(store: str, request: pytest.FixtureRequest) -> str:
    """An experiment of its own for each test."""
    return str(request.node.name)


def write(folder: Path, place: str, *steps: int, after: int = -1) -> None:
    with TrainLog(folder, after, Trackers(mlflow=place)) as log:
        for step in steps:
            log.write(step, {"loss": step / 2 + max(0, after), "held_out/nll": 3.0})


def client_of(store: str) -> Any:
    return import_module("mlflow").MlflowClient(store)  # when the store's fixture has turned its telemetry off


def runs(store: str, experiment: str) -> list[Any]:
    client = client_of(store)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def history(store: str, run: Any, name: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in client_of(store).get_metric_history(run.info.run_id, name)]


def test_a_run_of_mlflow_gets_every_line(tmp_path: Path, store: str, students: str) -> None:
    write(tmp_path / "student", f"{students}@{store}", 1, 2)
    (run,) = runs(store, students)
    assert (run.info.run_name, run.info.status) == ("student", "FINISHED")
    assert history(store, run, "loss") == [(1, 0.5), (2, 1.0)]
    assert history(store, run, "held_out/nll") == [(1, 3.0), (2, 3.0)]


def test_a_resumed_training_continues_its_run_and_a_new_one_has_its_own(
    tmp_path: Path, store: str, students: str
) -> None:
    place = f"{students}@{store}"
    write(tmp_path / "a", place, 1)
    write(tmp_path / "b", place, 1)
    write(tmp_path / "a", place, 2, after=1)
    assert sorted(run.data.metrics["loss"] for run in runs(store, students)) == [0.5, 2.0]
    write(tmp_path / "a", place, 1)
    assert sorted(run.info.run_name for run in runs(store, students)) == ["a", "a", "b"]


def test_a_name_may_have_an_at_sign_and_the_store_be_mlflows_own(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    write(tmp_path / "student", "/Users/me@example.org/students", 1)
    assert len(runs(store, "/Users/me@example.org/students")) == 1


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_how_a_training_ended_is_told(
    tmp_path: Path, store: str, students: str, error: type[BaseException], status: str
) -> None:
    with pytest.raises(error), TrainLog(tmp_path / "student", trackers=Trackers(mlflow=f"{students}@{store}")):
        raise error
    assert [run.info.status for run in runs(store, students)] == [status]


def test_a_store_that_cannot_be_opened_is_a_fault_without_its_password(tmp_path: Path, store: str) -> None:
    with pytest.raises(InfrastructureFault, match="MLflow") as raised:
        TrainLog(tmp_path / "student", trackers=Trackers(mlflow="students@mysteriously://me:hunter2@host/db"))
    assert "hunter2" not in str(raised.value)


def test_mlflow_that_is_not_installed_is_named_and_leaves_the_log_as_it_was(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "student", f"students@{store}", 1)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtra, match=r"mlflow is not installed; .*\[logs\]"):
        TrainLog(tmp_path / "student", trackers=Trackers(mlflow="students"))
    assert len(read_log(tmp_path / "student")) == 1
