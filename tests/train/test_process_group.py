"""Processes that train together come to what one does, each holds its share, and followers end with the leader."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from harness1.config import Lora, Train
from harness1.engines.engine import TrainerJob, follow, leading, open_local_engine
from harness1.errors import UsageError
from harness1.rows import TrainRow
from harness1.training import trainer as trainer_module
from harness1.training.algorithm import Algorithm, Cispo, NegativeLogLikelihood
from harness1.training.process_group import ALONE, ProcessGroup, gather_state, join_group
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Diverged, Trainer
from tests.tiny_models import save_tiny_model
from tests.train.test_trainer import made_rows

LIMIT_S = 120  # seconds after which processes count as hanging
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.multiprocessing"),
    *("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"),
    *("harness1.engines.engine", "tests.train.test_trainer"),
)  # imported once, in the process from which all others are forked


def codes_of(target: Callable[..., None], *arguments: object) -> list[int | None]:
    """Call `target(rank, *arguments)` in two processes as a launcher would; return their exit codes, and None for one
    that hangs."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    context.set_forkserver_preload(list(PRELOADED))
    members = [context.Process(target=_run, args=(rank, port, target, arguments)) for rank in (0, 1)]
    for each in members:
        each.start()
    ends = time.monotonic() + LIMIT_S
    for each in members:
        each.join(max(0.0, ends - time.monotonic()))
    codes = [each.exitcode for each in members]
    for each in members:
        each.kill()
    return codes


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        port: int = opened.getsockname()[1]
        return port


def _run(rank: int, port: int, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.setpgid(0, 0)  # interrupts of this process must not reach the tests
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        sys.stderr = nowhere
        target(rank, *arguments)


pytestmark = pytest.mark.service


def sampled(rows: Sequence[TrainRow], seed: int) -> list[TrainRow]:
    """The rows with an advantage and a recorded log probability of each token, as a rollout would have them."""
    random = Random(seed)
    return [
        msgspec.structs.replace(
            row,
            rollout_logprobs=tuple(mask * random.uniform(-6.0, -4.0) for mask in row.loss_mask),
            advantages=tuple(random.uniform(-1.0, 1.0) for _ in row.loss_mask),
        )
        for row in rows
    ]


STEPS: list[list[TrainRow]] = [
    made_rows(seed=1),
    made_rows((20,), seed=2),  # fewer passes than processes
    [*made_rows((30, 8), seed=3), TrainRow((1, 2, 3), (0, 1, 1), advantages=(0.0, 0.5, 0.0))],
    made_rows((25, 24, 23), seed=4),  # one process has a pass more
    made_rows(seed=5),
]
PLAYED = [sampled(rows, seed) for seed, rows in enumerate(STEPS)]
HALF = 3  # steps before the state is saved
EPSILON = 1e-4  # with a smaller one, Adam makes much of the rounding of gradients that are next to 0
CLIP = 0.5  # in every process
TRAIN = Train(rate=1e-2, lora=Lora(rank=0), dtype="float32", micro_tokens=30)
NLL, CISPO = NegativeLogLikelihood(), Cispo()
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "experts": {"kind": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
    "sinks": {"kind": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
CASES = (
    *("nll, plain", "nll, tied", "cispo, plain, adapters", "cispo, tied, adapters", "cispo, experts"),
    *("nll, plain, checkpointing", "nll, experts, adapters, of experts", "cispo, plain, adapters, bfloat16"),
    "cispo, sinks, adapters, of experts, bfloat16, checkpointing",
)  # training runs of a few steps: loss, model, and settings
RESUMED = ("nll, tied", "cispo, plain, adapters", "nll, experts, adapters, of experts")
"""Cases that two processes go on with."""


def steps_of(case: str) -> list[list[TrainRow]]:
    return STEPS if case.startswith("nll") else PLAYED


def rounding_of(case: str) -> float:
    """How many times as far apart as in float32 two trainings may come: in bfloat16, sums in another order turn the
    rounding of an activation now and then."""
    return 1000.0 if "bfloat16" in case else 1.0


def trainer_in(group: ProcessGroup, case: str, home: Path) -> Trainer:
    loss, model, *settings = case.split(", ")
    lora = Lora(rank=4 * ("adapters" in settings), alpha=8.0, experts="of experts" in settings)
    dtype: Any = "bfloat16" if "bfloat16" in settings else "float32"
    train = msgspec.structs.replace(TRAIN, lora=lora, dtype=dtype, checkpointing="checkpointing" in settings)
    loaded = load_trainable(home / model, train, "cpu")
    trainer = Trainer(loaded, NLL if loss == "nll" else CISPO, train, len(STEPS), group)
    trainer.optimizer.param_groups[0]["eps"] = EPSILON
    return trainer


def train_in(group: ProcessGroup, case: str, home: Path, states: Path) -> dict[str, object]:
    """What a process comes to. It saves its state on the way."""
    trainer, steps = trainer_in(group, case, home), steps_of(case)
    values = [trainer.step(rows) for rows in steps[:HALF]]
    trainer.save(states)
    values += [trainer.step(rows) for rows in steps[HALF:]]
    found = {"loss": trainer.loss(steps[0]), "weights": gather_state(trainer.model)}
    return {"values": values, **found, "held": held(trainer)}


def go_on_in(group: ProcessGroup, case: str, home: Path, states: Path) -> dict[str, object]:
    """What a process comes to that resumes from a state."""
    trainer = trainer_in(group, case, home)
    (name,) = (path.name for path in states.iterdir())
    trainer.load(states, name)
    return {"values": [trainer.step(rows) for rows in steps_of(case)[HALF:]], "weights": gather_state(trainer.model)}


def held(trainer: Trainer) -> tuple[int, int]:
    """The numbers in the weights and in the optimizer's moments that this process holds."""

    def local(values: Any) -> int:
        return sum(each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in values)

    moments = [each for known in trainer.optimizer.state.values() for each in known.values() if each.ndim]
    return local(trainer.model.parameters()), local(moments)


def member(rank: int, home: Path) -> None:
    """One of two processes."""
    trainer_module.CLIP = CLIP
    with join_group(ProcessGroup(rank, 2)) as group:
        found: dict[str, Any] = {"leads": group.leads}
        found["told"] = group.broadcast({"seen": float(group.rank), f"only_{group.rank}": 1.0})
        found["begun"] = {name: train_in(group, name, home, home / "two" / name) for name in CASES}
        found["resumed"] = {name: go_on_in(group, name, home, home / "one" / name) for name in RESUMED}
        torch.save(found, home / f"{rank}.pt")
        group.wait()
        assert all((home / f"{each}.pt").exists() for each in (0, 1))
    assert not torch.distributed.is_initialized()


@pytest.fixture(autouse=True)
def _clipping(_no_clipping: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the other processes."""
    monkeypatch.setattr(trainer_module, "CLIP", CLIP)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("group")
    for model, settings in MODELS.items():
        save_tiny_model(home / model, initializer_range=0.1, **settings)
    return home


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Any]:
    """What a single process comes to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "CLIP", CLIP)
        return {name: train_in(ALONE, name, home, home / "one" / name) for name in CASES}


@pytest.fixture(scope="module")
def found(home: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two processes found."""
    assert alone
    assert codes_of(member, home) == [0, 0]
    return [torch.load(home / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def agree(values: Any, expected: Any, rounding: float = 1.0) -> None:
    for value, other in zip(values, expected, strict=True):
        assert value == pytest.approx(other, rel=1e-5 * rounding)


def test_members_know_their_places_and_hear_the_first(found: list[dict[str, Any]]) -> None:
    assert [each["leads"] for each in found] == [True, False]
    assert all(each["told"] == {"seen": 0.0, "only_0": 1.0} for each in found)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_come_to_the_weights_of_one_and_hold_half_each(
    alone: dict[str, Any], found: list[dict[str, Any]], name: str
) -> None:
    expected, members = alone[name], [each["begun"][name] for each in found]
    for member in members:
        agree(member["values"], expected["values"], rounding_of(name))
        assert member["loss"] == pytest.approx(expected["loss"], rel=1e-5 * rounding_of(name))
    torch.testing.assert_close(members[0]["weights"], expected["weights"], rtol=0, atol=1e-6 * rounding_of(name))
    assert members[1]["weights"] == {}
    for part, numbers in enumerate(expected["held"]):
        shares = [member["held"][part] for member in members]
        assert sum(shares) == numbers
        assert shares[0] == pytest.approx(numbers / 2, rel=0.01)


@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_go_on_from_one(alone: dict[str, Any], found: list[dict[str, Any]], name: str) -> None:
    for each in found:
        agree(each["resumed"][name]["values"], alone[name]["values"][HALF:])
    torch.testing.assert_close(found[0]["resumed"][name]["weights"], alone[name]["weights"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_one_process_goes_on_from_the_state_of_two(home: Path, found: list[dict[str, Any]], name: str) -> None:
    resumed: Any = go_on_in(ALONE, name, home, home / "two" / name)
    expected = found[0]["begun"][name]
    agree(resumed["values"], expected["values"][HALF:], rounding_of(name))
    torch.testing.assert_close(resumed["weights"], expected["weights"], rtol=0, atol=1e-6 * rounding_of(name))


Leader = Callable[[Path, ProcessGroup], None]


def job(home: Path, algorithm: Algorithm = NLL) -> TrainerJob:
    return TrainerJob(home / "plain", algorithm, TRAIN, 4, threads=1)


def found_by(engine: Trainer, home: Path) -> dict[str, Any]:
    """What the calls of a trainer return."""
    first = engine.step(PLAYED[0])
    name = engine.save(home)
    second = engine.step(PLAYED[1])
    looked = {"loss": engine.loss(PLAYED[0]), "weights": engine.weights(), "logprobs": engine.logprobs(PLAYED[2])}
    engine.load(home, name)
    return {"first": first, "second": second, "again": engine.step(PLAYED[1]), **looked}


def uses_everything(home: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home, CISPO), group)
    torch.save(found_by(engine, home / "led"), home / "found.pt")


def diverges_and_goes_on(home: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home, CISPO), group)
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
        open_local_engine(TrainerJob(home / "bare", NLL, Train(dtype="float32"), 4), group)


def fails_within_a_step(home: Path, group: ProcessGroup) -> None:
    def fail(done: int, of: int) -> None:
        raise ValueError("a fault of this process alone")

    open_local_engine(job(home), group).step(STEPS[0], fail)


def is_killed(home: Path, group: ProcessGroup) -> None:
    open_local_engine(job(home), group)
    os._exit(9)


LEADERS: tuple[tuple[Leader, int], ...] = (
    *((diverges_and_goes_on, 0), (is_interrupted_within_a_step, 1), (cannot_write, 0), (has_no_model, 0)),
    *((has_a_model_that_cannot_be_adapted, 0), (fails_within_a_step, 1), (is_killed, 9)),
)  # what leading processes do, and their exit codes


def follower(rank: int, home: Path, lead: Leader, follows: Callable[[ProcessGroup], None] = follow) -> None:
    """One of two processes. What it says goes to a file."""
    trainer_module.EPSILON, trainer_module.CLIP = EPSILON, CLIP
    with (home / f"{rank}.err").open("w") as said, redirect_stderr(said), join_group(ProcessGroup(rank, 2)) as group:
        if group.leads:
            with leading(group):
                lead(home, group)
        else:
            follows(group)


@pytest.mark.parametrize(("lead", "code"), LEADERS, ids=lambda value: getattr(value, "__name__", None))
def test_followers_end_with_the_process_that_leads_and_say_nothing(home: Path, lead: Leader, code: int) -> None:
    assert (codes_of(follower, home, lead), (home / "1.err").read_text()) == ([code, 0], "")


def test_repeated_calls_return_what_they_do_alone(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "EPSILON", EPSILON)
    assert codes_of(follower, home, uses_everything) == [0, 0]
    found = torch.load(home / "found.pt", weights_only=True)
    expected = found_by(open_local_engine(job(home, CISPO)), tmp_path)
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
    assert codes_of(follower, home, loses_its_follower, dies) == [0, 7]
