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
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from harness1.config import Lora, Train
from harness1.engines.engine import TrainerJob, follow, leading, open_local_engine
from harness1.errors import UsageError
from harness1.models.checkpoint import Checkpoint
from harness1.rows import TrainRow
from harness1.training import trainer
from harness1.training.algorithm import Algorithm, Cispo, NegativeLogLikelihood
from harness1.training.process_group import ALONE, ProcessGroup, gather_state, join_group
from harness1.training.saving import write_model
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Diverged, Trainer
from tests.tiny_models import save_tiny_model
from tests.train.test_micro_batch import made_rows

LIMIT_S = 120
"""Seconds after which processes count as hanging."""
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.multiprocessing"),
    *("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"),
    *("harness1.engines.engine", "tests.train.test_micro_batch"),
)
"""Imported once, in the process from which all others are forked."""


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
CARD = Checkpoint(format="hermes", counter="", env={}, env_hash="", base="")
HALF = 3
"""Steps before the state is saved."""
TRAIN = Train(rate=1e-2, lora=Lora(rank=0), dtype="float32", micro_tokens=30)
ADAPTED = msgspec.structs.replace(TRAIN, lora=Lora(rank=4, alpha=8.0))
NLL, CISPO = NegativeLogLikelihood(), Cispo()


class Case(NamedTuple):
    """A training run of a few steps."""

    model: str
    train: Train
    algorithm: Algorithm

    @property
    def steps(self) -> list[list[TrainRow]]:
        return STEPS if self.algorithm is NLL else PLAYED

    @property
    def rounding(self) -> float:
        """How many times as far apart as in float32 two trainings may come.

        In bfloat16, sums in another order turn the rounding of an activation now and then.
        """
        return 1000.0 if self.train.dtype == "bfloat16" else 1.0


def changed(train: Train, **changes: Any) -> Train:
    return msgspec.structs.replace(train, **changes)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "experts": {"kind": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
    "sinks": {"kind": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
CASES = {
    "nll": Case("plain", TRAIN, NLL),
    "nll, adapters": Case("plain", ADAPTED, NLL),
    "cispo": Case("plain", TRAIN, CISPO),
    "cispo, adapters": Case("plain", ADAPTED, CISPO),
    "nll, a tied head": Case("tied", TRAIN, NLL),
    "cispo, adapters, a tied head": Case("tied", ADAPTED, CISPO),
    "cispo, experts": Case("experts", TRAIN, CISPO),
    "nll, adapters, experts": Case("experts", ADAPTED, NLL),
    "nll, sinks": Case("sinks", TRAIN, NLL),
    "cispo, adapters, sinks, checkpointing": Case("sinks", changed(ADAPTED, checkpointing=True), CISPO),
    "nll, checkpointing": Case("plain", changed(TRAIN, checkpointing=True), NLL),
    "cispo, adapters, checkpointing": Case("plain", changed(ADAPTED, checkpointing=True), CISPO),
    "cispo, adapters, bfloat16": Case("plain", changed(ADAPTED, dtype="bfloat16"), CISPO),
    "nll, adapters, bfloat16, checkpointing": Case("tied", changed(ADAPTED, dtype="bfloat16", checkpointing=True), NLL),
}
ON_EXPERTS = changed(ADAPTED, lora=Lora(rank=4, alpha=8.0, experts=True))
CASES |= {
    "nll, adapters of experts": Case("experts", ON_EXPERTS, NLL),
    "cispo, adapters of experts, sinks": Case("sinks", ON_EXPERTS, CISPO),
    "cispo, adapters of experts, sinks, bfloat16, checkpointing": Case(
        "sinks", changed(ON_EXPERTS, dtype="bfloat16", checkpointing=True), CISPO
    ),
}
RESUMED = ("nll, a tied head", "cispo, adapters", "cispo, adapters of experts, sinks")
"""Cases that two processes go on with."""


def trainer_in(group: ProcessGroup, case: Case, home: Path) -> Trainer:
    model = load_trainable(home / case.model, case.train, "cpu")
    trainer = Trainer(model, case.algorithm, case.train, len(case.steps), group)
    # With a smaller epsilon, Adam makes much of the rounding of gradients that are next to 0.
    trainer.optimizer.param_groups[0]["eps"] = 1e-4
    return trainer


def train_in(group: ProcessGroup, case: Case, home: Path, states: Path) -> dict[str, object]:
    """What a process comes to. It saves its state on the way."""
    trainer, steps = trainer_in(group, case, home), case.steps
    values = [trainer.step(rows) for rows in steps[:HALF]]
    trainer.save(states)
    written, now = home / "written" / str(group.size) / states.name, trainer.weights()
    if group.leads:
        write_model(written, trainer.model, now, home / case.model, CARD)
    group.wait()
    loss_then = trainer.loss(steps[0])
    values += [trainer.step(rows) for rows in steps[HALF:]]
    saved, loss, weights = trainer.loss(steps[0], written), trainer.loss(steps[0]), gather_state(trainer.model)
    losses = {"then": loss_then, "saved": saved, "loss": loss}
    return {"values": values, **losses, "weights": weights, "held": held(trainer)}


def go_on_in(group: ProcessGroup, case: Case, home: Path, states: Path) -> dict[str, object]:
    """What a process comes to that resumes from a state."""
    trainer = trainer_in(group, case, home)
    (name,) = (path.name for path in states.iterdir())
    trainer.load(states, name)
    return {"values": [trainer.step(rows) for rows in case.steps[HALF:]], "weights": gather_state(trainer.model)}


def held(trainer: Trainer) -> tuple[int, int]:
    """The numbers in the weights and in the optimizer's moments that this process holds."""
    moments = [each for known in trainer.optimizer.state.values() for each in known.values() if each.ndim]
    return sum(map(local, trainer.model.parameters())), sum(map(local, moments))


def local(value: Any) -> int:
    held: int = value.to_local().numel() if hasattr(value, "to_local") else value.numel()
    return held


def member(rank: int, home: Path) -> None:
    """One of two processes."""
    with join_group(ProcessGroup(rank, 2)) as group:
        found: dict[str, Any] = {"leads": group.leads}
        found["told"] = group.broadcast({"seen": float(group.rank), f"only_{group.rank}": 1.0})
        found["begun"] = {name: train_in(group, case, home, home / "two" / name) for name, case in CASES.items()}
        found["resumed"] = {name: go_on_in(group, CASES[name], home, home / "one" / name) for name in RESUMED}
        found["diverged"] = diverge(group, home)
        torch.save(found, home / f"{rank}.pt")
        group.wait()
        assert (home / "0.pt").exists()
        assert (home / "1.pt").exists()
    assert not torch.distributed.is_initialized()


def diverge(group: ProcessGroup, home: Path) -> dict[str, float]:
    """The values of a step after one whose loss was no number."""
    trainer = trainer_in(group, CASES["cispo"], home)
    with pytest.raises(Diverged):
        trainer.step([msgspec.structs.replace(row, token_weight=1e38) for row in PLAYED[0]])
    return trainer.step(PLAYED[0])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what two processes found."""
    home = tmp_path_factory.mktemp("group")
    for model, settings in MODELS.items():
        save_tiny_model(home / model, initializer_range=0.1, **settings)
    for name in RESUMED:
        train_in(ALONE, CASES[name], home, home / "one" / name)
    assert codes_of(member, home) == [0, 0]
    return home


@pytest.fixture(scope="module")
def found(home: Path) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    return [torch.load(home / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def agree(values: Any, expected: Any, rounding: float = 1.0) -> None:
    for value, other in zip(values, expected, strict=True):
        assert value == pytest.approx(other, rel=1e-5 * rounding)


def test_members_know_their_places_and_hear_the_first(found: list[dict[str, Any]]) -> None:
    assert [each["leads"] for each in found] == [True, False]
    assert all(each["told"] == {"seen": 0.0, "only_0": 1.0} for each in found)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_come_to_the_weights_of_one_and_hold_half_each(
    home: Path, found: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    alone: Any = train_in(ALONE, CASES[name], home, tmp_path)
    members = [each["begun"][name] for each in found]
    for member in members:
        agree(member["values"], alone["values"], CASES[name].rounding)
        assert member["loss"] == pytest.approx(alone["loss"], rel=1e-5 * CASES[name].rounding)
        assert member["saved"] == pytest.approx(member["then"], rel=1e-6)
        assert member["saved"] != pytest.approx(member["loss"], rel=1e-3)
    torch.testing.assert_close(members[0]["weights"], alone["weights"], rtol=0, atol=1e-6 * CASES[name].rounding)
    assert members[1]["weights"] == {}
    for part, numbers in enumerate(alone["held"]):
        shares = [member["held"][part] for member in members]
        assert sum(shares) == numbers
        assert shares[0] == pytest.approx(numbers / 2, rel=0.01)


@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_go_on_from_the_state_of_one(
    home: Path, found: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    alone: Any = train_in(ALONE, CASES[name], home, tmp_path)
    for each in found:
        agree(each["resumed"][name]["values"], alone["values"][HALF:])
    torch.testing.assert_close(found[0]["resumed"][name]["weights"], alone["weights"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_one_process_goes_on_from_the_state_of_two(home: Path, found: list[dict[str, Any]], name: str) -> None:
    resumed: Any = go_on_in(ALONE, CASES[name], home, home / "two" / name)
    expected = found[0]["begun"][name]
    agree(resumed["values"], expected["values"][HALF:], CASES[name].rounding)
    torch.testing.assert_close(resumed["weights"], expected["weights"], rtol=0, atol=1e-6 * CASES[name].rounding)


def test_all_processes_see_that_a_step_diverged_and_go_on_together(home: Path, found: list[dict[str, Any]]) -> None:
    expected = trainer_in(ALONE, CASES["cispo"], home).step(PLAYED[0])
    assert [each["diverged"] for each in found] == [pytest.approx(expected, rel=1e-5)] * 2


EPSILON = 1e-4
"""With a smaller one, Adam makes much of the rounding of gradients that are next to 0."""
Leader = Callable[[Path, ProcessGroup], None]


def job(home_followers: Path, **changes: Any) -> TrainerJob:
    return TrainerJob(
        home_followers / "model", **{"algorithm": NLL, "train": TRAIN, "steps": 4, "threads": 1, **changes}
    )


def found_by(engine: Trainer, home_followers: Path) -> dict[str, Any]:
    """What the calls of a trainer return."""
    first = engine.step(PLAYED[0])
    name = engine.save(home_followers)
    second = engine.step(PLAYED[1])
    looked = {"loss": engine.loss(PLAYED[0]), "weights": engine.weights()}
    looked |= {"logprobs": engine.logprobs(PLAYED[2])}
    engine.load(home_followers, name)
    return {"first": first, "second": second, "again": engine.step(PLAYED[1]), **looked}


def uses_everything(home_followers: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home_followers, algorithm=CISPO), group)
    torch.save(found_by(engine, home_followers / "led"), home_followers / "found.pt")


def diverges_and_goes_on(home_followers: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home_followers, algorithm=CISPO), group)
    with pytest.raises(Diverged):
        engine.step([msgspec.structs.replace(row, token_weight=1e38) for row in PLAYED[0]])
    assert engine.weights()


def is_interrupted_within_a_step(home_followers: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home_followers), group)

    def interrupt(done: int, of: int) -> None:
        os.killpg(0, signal.SIGINT)  # as a terminal does

    with pytest.raises(KeyboardInterrupt):
        engine.step(STEPS[0], interrupt)
    assert engine.step_count == 1
    engine.save(home_followers / "interrupted")
    raise KeyboardInterrupt


def cannot_write(home_followers: Path, group: ProcessGroup) -> None:
    engine = open_local_engine(job(home_followers), group)
    (home_followers / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write the state of training to .*file"):
        engine.save(home_followers / "file")
    assert engine.weights()


def has_no_model(home_followers: Path, group: ProcessGroup) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        open_local_engine(TrainerJob(home_followers / "nowhere", NLL, TRAIN, 4), group)


def has_a_model_that_cannot_be_adapted(home_followers: Path, group: ProcessGroup) -> None:
    save_tiny_model(home_followers / "bare", "gpt2", n_inner=96, n_positions=64)
    with pytest.raises(UsageError, match="no linear layers"):
        open_local_engine(TrainerJob(home_followers / "bare", NLL, ADAPTED, 4), group)


def refuses_the_work(home_followers: Path, group: ProcessGroup) -> None:
    open_local_engine(job(home_followers), group)
    raise UsageError("another folder, please")


def fails_within_a_step(home_followers: Path, group: ProcessGroup) -> None:
    def fail(done: int, of: int) -> None:
        raise ValueError("a fault of this process alone")

    open_local_engine(job(home_followers), group).step(STEPS[0], fail)


def is_killed(home_followers: Path, group: ProcessGroup) -> None:
    open_local_engine(job(home_followers), group)
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


def member_followers(
    rank: int, home_followers: Path, lead: Leader, follows: Callable[[ProcessGroup], None] = follow
) -> None:
    """One of two processes. What it says goes to a file."""
    trainer.EPSILON = EPSILON
    with (
        (home_followers / f"{rank}.err").open("w") as said,
        redirect_stderr(said),
        join_group(ProcessGroup(rank, 2)) as group,
    ):
        if group.leads:
            with leading(group):
                lead(home_followers, group)
        else:
            follows(group)


@pytest.fixture(scope="module")
def home_followers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home_followers = tmp_path_factory.mktemp("followers")
    save_tiny_model(home_followers / "model", initializer_range=0.1)
    return home_followers


@pytest.mark.parametrize(("lead", "code"), LEADERS, ids=lambda value: getattr(value, "__name__", None))
def test_followers_end_with_the_process_that_leads_and_say_nothing(
    home_followers: Path, lead: Leader, code: int
) -> None:
    assert codes_of(member_followers, home_followers, lead) == [code, 0]
    assert (home_followers / "1.err").read_text() == ""


def test_calls_that_others_repeat_return_what_they_do_alone(
    home_followers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "EPSILON", EPSILON)
    assert codes_of(member_followers, home_followers, uses_everything) == [0, 0]
    found = torch.load(home_followers / "found.pt", weights_only=True)
    expected = found_by(open_local_engine(job(home_followers, algorithm=CISPO)), tmp_path)
    for name in ("first", "second", "again", "loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert found["again"] == pytest.approx(found["second"], rel=1e-6)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-6)
    for logprobs, others in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert logprobs == pytest.approx(others, abs=1e-5)


def dies(group: ProcessGroup) -> None:
    group.broadcast(None)
    os._exit(7)


def loses_its_follower(home_followers: Path, group: ProcessGroup) -> None:
    with pytest.raises(UsageError, match="another process of this training run has ended"):
        open_local_engine(job(home_followers), group)
    assert group.broken


def test_a_leading_process_that_lost_another_says_so(home_followers: Path) -> None:
    assert codes_of(member_followers, home_followers, loses_its_follower, dies) == [0, 7]
