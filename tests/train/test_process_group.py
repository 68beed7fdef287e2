"""Processes that train together come to what one alone does, and each holds its share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from harness1.config import Lora, Train
from harness1.models.checkpoint import Checkpoint
from harness1.rows import TrainRow
from harness1.training.algorithm import Algorithm, Cispo, NegativeLogLikelihood
from harness1.training.process_group import ALONE, ProcessGroup, gather_state, join_group
from harness1.training.saving import write_model
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Diverged, Trainer
from tests.tiny_models import save_tiny_model
from tests.train.processes import codes_of
from tests.train.test_micro_batch import made_rows

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
TRAIN = Train(
    rate=1e-2,
    lora=Lora(rank=0),
    dtype="float32",
    micro_tokens=30,
    clip=0.5,
    weight_decay=0.1,
)
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
