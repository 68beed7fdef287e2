"""What a training writes down can be read, and a resumed one writes its own lines only once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.runs.files import Stage
from harness1.training.log import LOG, Trackers, TrainLog, clear_training, read_log


def write(folder: Path | None, *steps: int, after: int = -1, **options: Any) -> None:
    with TrainLog(folder, after, Trackers(**options)) as log:
        for step in steps:
            log.write(step, {"loss": step / 2 + max(0, after)})


def scalars(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_lines_behind_the_step_that_training_goes_on_from_are_taken_out(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
    write(tmp_path, 0, 1, 2, 2, 3, 4)
    write(tmp_path, 3, after=2)
    assert [line["step"] for line in read_log(tmp_path)] == [0, 1, 2, 2, 3]
    assert read_log(tmp_path)[-1] == {"step": 3, "loss": 3.5}
    write(tmp_path, 1, after=0)  # what was measured at the start stays
    assert [line["step"] for line in read_log(tmp_path)] == [0, 1]
    write(tmp_path)
    assert read_log(tmp_path) == []


def test_a_training_that_another_process_is_writing_is_neither_begun_nor_cleared(tmp_path: Path) -> None:
    Stage("rl train", {}).write(tmp_path)
    with TrainLog(tmp_path) as log:
        log.write(0, {"loss": 1.0})
        for refused in (lambda: TrainLog(tmp_path), lambda: clear_training(tmp_path, "rl train")):
            with pytest.raises(UsageError, match="is being written by another process"):
                refused()
        assert read_log(tmp_path) == [{"step": 0, "loss": 1.0}]
    clear_training(tmp_path, "rl train")
    assert list(tmp_path.iterdir()) == []
    clear_training(tmp_path, "rl train")


def test_a_torn_last_line_is_left_out_and_written_over(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"step": 3, "lo')
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2]
    write(tmp_path, 3, after=2)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3]


def test_a_process_that_is_not_to_write_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    write(None, 1, tensorboard=True, wandb="project")
    assert list(tmp_path.iterdir()) == []


def test_event_files_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "with", 1, 2, tensorboard=True)
    assert scalars(tmp_path / "with") == [(1, 0.5), (2, 1.0)]
    write(tmp_path / "with", 2, after=1, tensorboard=True)  # a resumed run replaces those that were lost
    assert scalars(tmp_path / "with") == [(1, 0.5), (2, 2.0)]
    write(tmp_path / "without", 1, 2)
    assert [path.name for path in (tmp_path / "without").iterdir()] == [LOG]


def test_a_project_of_weights_and_biases_gets_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, 1, 2, wandb="students")
    assert wandb.init.call_args.kwargs["project"] == "students"
    project = wandb.init.return_value
    assert project.log.call_args_list == [call({"loss": 0.5}, step=1), call({"loss": 1.0}, step=2)]
    project.finish.assert_called_once_with()


@pytest.mark.parametrize(
    ("module", "package", "options"),
    [
        ("wandb", "wandb", {"wandb": "students"}),
        ("torch.utils.tensorboard", "tensorboard", {"tensorboard": True}),
        ("mlflow", "mlflow", {"mlflow": "students"}),
    ],
)
def test_what_is_not_installed_is_named_and_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str, options: dict[str, Any]
) -> None:
    write(tmp_path, 1)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"{package} is not installed; .*\[logs\]"):
        TrainLog(tmp_path, trackers=Trackers(**options))
    assert len(read_log(tmp_path)) == 1


needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")


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


def write_run(folder: Path, place: str, *steps: int, after: int = -1) -> None:
    with TrainLog(folder, after, Trackers(mlflow=place)) as log:
        for step in steps:
            log.write(step, {"loss": step / 2 + max(0, after), "held_out/nll": 3.0})


def client_of(store: str) -> Any:
    return import_module("mlflow").MlflowClient(store)  # when the store's fixture has turned its telemetry off


def runs(store: str, experiment: str) -> list[Any]:
    client = client_of(store)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


@needs_mlflow
def test_a_run_of_mlflow_gets_every_line_and_is_continued_if_resumed(tmp_path: Path, store: str, students: str) -> None:
    place = f"{students}@{store}"
    write_run(tmp_path / "a", place, 1, 2)
    (run,) = runs(store, students)
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    history = client_of(store).get_metric_history(run.info.run_id, "held_out/nll")
    assert [(each.step, each.value) for each in history] == [(1, 3.0), (2, 3.0)]
    write_run(tmp_path / "b", place, 1)
    write_run(tmp_path / "a", place, 3, after=2)
    assert sorted(run.data.metrics["loss"] for run in runs(store, students)) == [0.5, 3.5]
    write_run(tmp_path / "a", place, 1)
    assert sorted(run.info.run_name for run in runs(store, students)) == ["a", "a", "b"]


@needs_mlflow
def test_a_name_may_have_an_at_sign_in_mlflow(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    write_run(tmp_path / "student", "/Users/me@example.org/students", 1)
    assert len(runs(store, "/Users/me@example.org/students")) == 1


@needs_mlflow
@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_how_training_ended(tmp_path: Path, store: str, students: str, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), TrainLog(tmp_path / "student", trackers=Trackers(mlflow=f"{students}@{store}")):
        raise error
    assert [run.info.status for run in runs(store, students)] == [status]


@needs_mlflow
def test_a_store_that_cannot_be_opened_is_a_fault_without_its_password(tmp_path: Path, store: str) -> None:
    with pytest.raises(InfrastructureFault, match="MLflow") as raised:
        TrainLog(tmp_path / "student", trackers=Trackers(mlflow="students@mysteriously://me:hunter2@host/db"))
    assert "hunter2" not in str(raised.value)
