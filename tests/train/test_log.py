"""What a training writes down can be read, and a resumed one writes its own lines only once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness1.errors import MissingExtra, UsageError
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
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"step": 4, "lo')  # torn: it is left out, and written over
    assert len(read_log(tmp_path)) == 5
    write(tmp_path, 1, after=0)  # what was measured at the start stays
    assert [line["step"] for line in read_log(tmp_path)] == [0, 1]


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
    [("wandb", "wandb", {"wandb": "students"}), ("torch.utils.tensorboard", "tensorboard", {"tensorboard": True})],
)
def test_what_is_not_installed_is_named_and_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str, options: dict[str, Any]
) -> None:
    write(tmp_path, 1)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"{package} is not installed; .*\[logs\]"):
        TrainLog(tmp_path, trackers=Trackers(**options))
    assert len(read_log(tmp_path)) == 1
