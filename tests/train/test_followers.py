"""Processes that follow do what the leading one does, and end with it, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from harness1.engines.engine import TrainerJob, follow, leading, open_local_engine
from harness1.errors import UsageError
from harness1.training import trainer
from harness1.training.process_group import ProcessGroup, join_group
from harness1.training.trainer import Diverged, Trainer
from tests.tiny_models import save_tiny_model
from tests.train.processes import codes_of
from tests.train.test_process_group import ADAPTED, CISPO, NLL, PLAYED, STEPS, TRAIN

pytestmark = pytest.mark.service
EPSILON = 1e-4
"""With a smaller one, Adam makes much of the rounding of gradients that are next to 0."""
Leader = Callable[[Path, ProcessGroup], None]


def job(home: Path, **changes: Any) -> TrainerJob:
    return TrainerJob(home / "model", **{"algorithm": NLL, "train": TRAIN, "steps": 4, "threads": 1, **changes})


def found_by(engine: Trainer, home: Path) -> dict[str, Any]:
    """What the calls of a trainer return."""
    first = engine.step(PLAYED[0])
    name = engine.save(home)
    second = engine.step(PLAYED[1])
    looked = {"loss": engine.loss(PLAYED[0]), "weights": engine.weights()}
    looked |= {"logprobs": engine.logprobs(PLAYED[2])}
    engine.load(home, name)
    return {"first": first, "second": second, "again": engine.step(PLAYED[1]), **looked}


def uses_everything(home: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home, algorithm=CISPO), group)
    torch.save(found_by(engine, home / "led"), home / "found.pt")


def diverges_and_goes_on(home: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home, algorithm=CISPO), group)
    with pytest.raises(Diverged):
        engine.step([msgspec.structs.replace(row, token_weight=1e38) for row in PLAYED[0]])
    assert engine.weights()


def is_interrupted_within_a_step(home: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home), group)

    def interrupt(done: int, of: int) -> None:
        os.killpg(0, signal.SIGINT)  # as a terminal does

    with pytest.raises(KeyboardInterrupt):
        engine.step(STEPS[0], interrupt)
    assert engine.step_count == 1
    engine.save(home / "interrupted")
    raise KeyboardInterrupt


def cannot_write(home: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home), group)
    (home / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write the state of training to .*file"):
        engine.save(home / "file")
    assert engine.weights()


def has_no_model(home: Path, group: ProcessGroup) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        open_local_engine(TrainerJob(home / "nowhere", NLL, TRAIN, 4), group)


def has_a_model_that_cannot_be_adapted(home: Path, group: ProcessGroup) -> None:
    save_tiny_model(home / "bare", "gpt2", n_inner=96, n_positions=64)
    with pytest.raises(UsageError, match="no linear layers"):
        open_local_engine(TrainerJob(home / "bare", NLL, ADAPTED, 4), group)


def refuses_the_work(home: Path, group: ProcessGroup) -> None:
    open_local_engine(job(home), group)
    raise UsageError("another folder, please")


def fails_within_a_step(home: Path, group: ProcessGroup) -> None:
    def fail(done: int, of: int) -> None:
        raise ValueError("a fault of this process alone")

    open_local_engine(job(home), group).step(STEPS[0], fail)


def is_killed(home: Path, group: ProcessGroup) -> None:
    open_local_engine(job(home), group)
    os._exit(9)


LEADERS: tuple[tuple[Leader, int], ...] = (
    (uses_everything, 0),
    (diverges_and_goes_on, 0),
    (is_interrupted_within_a_step, 1),
    (cannot_write, 0),
    (has_no_model, 0),
    (has_a_model_that_cannot_be_adapted, 0),
    (refuses_the_work, 1),
    (fails_within_a_step, 1),
    (is_killed, 9),
)
"""What leading processes do, and their exit codes."""


def member(rank: int, home: Path, lead: Leader, follows: Callable[[ProcessGroup], None] = follow) -> None:
    """One of two processes. What it says goes to a file."""
    trainer.EPSILON = EPSILON
    with (home / f"{rank}.err").open("w") as said, redirect_stderr(said), join_group(ProcessGroup(rank, 2)) as group:
        if group.leads:
            with leading(group):
                lead(home, group)
        else:
            follows(group)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("followers")
    save_tiny_model(home / "model", initializer_range=0.1)
    return home


@pytest.mark.parametrize(("lead", "code"), LEADERS, ids=lambda value: getattr(value, "__name__", None))
def test_followers_end_with_the_process_that_leads_and_say_nothing(home: Path, lead: Leader, code: int) -> None:
    assert codes_of(member, home, lead) == [code, 0]
    assert (home / "1.err").read_text() == ""


def test_calls_that_others_repeat_return_what_they_do_alone(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "EPSILON", EPSILON)
    assert codes_of(member, home, uses_everything) == [0, 0]
    found = torch.load(home / "found.pt", weights_only=True)
    expected = found_by(open_local_engine(job(home, algorithm=CISPO)), tmp_path)
    for name in ("first", "second", "again", "loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert found["again"] == pytest.approx(found["second"], rel=1e-6)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-6)
    for logprobs, others in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert logprobs == pytest.approx(others, abs=1e-5)


def dies(group: ProcessGroup) -> None:
    group.broadcast(None)
    os._exit(7)


def loses_its_follower(home: Path, group: ProcessGroup) -> None:
    with pytest.raises(UsageError, match="another process of this training run has ended"):
        open_local_engine(job(home), group)
    assert group.broken


def test_a_leading_process_that_lost_another_says_so(home: Path) -> None:
    assert codes_of(member, home, loses_its_follower, dies) == [0, 7]
