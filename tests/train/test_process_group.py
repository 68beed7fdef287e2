"""Processes that train together do what one alone does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from harness1.config import Lora, Train
from harness1.rows.row import TrainRow
from harness1.train.algorithm import NegativeLogLikelihood
from harness1.train.process_group import ALONE, ProcessGroup, joined_group
from harness1.train.trainable import load_trainable
from harness1.train.trainer import Trainer
from tests.tiny_models import save_tiny_model
from tests.train.test_micro_batch import made_rows

pytestmark = pytest.mark.service

STEPS: list[list[TrainRow]] = [
    made_rows(seed=1),
    made_rows((20,), seed=2),  # fewer passes than processes
    [*made_rows((30, 8), seed=3), TrainRow((1, 2, 3), (0, 1, 1), advantages=(0.0, 0.5, 0.0))],
]
TRAIN = Train(
    rate=1e-2,
    lora=Lora(rank=0),
    dtype="float32",
    micro_tokens=30,
    clip=0.5,
    weight_decay=0.1,
    epsilon=1e-4,  # with a smaller one, Adam makes much of the rounding of gradients that are next to 0
)


def train_in(group: ProcessGroup, folder: Path) -> dict[str, object]:
    """What a process comes to."""
    trainer = Trainer(load_trainable(folder, TRAIN, "cpu"), NegativeLogLikelihood(), TRAIN, len(STEPS), group)
    values = [trainer.step(rows) for rows in STEPS]
    looked = trainer.loss(STEPS[0])
    return {"values": values, "looked": looked, "weights": trainer.state()["weights"]}


def member(rank: int, port: int, folder: Path) -> None:
    """One of two processes, as a launcher starts it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with joined_group(2, "cpu") as group:
        found = train_in(group, folder)
        shared = group.broadcast({"seen": float(group.rank), f"only_{group.rank}": 1.0})
        torch.save({**found, "group": tuple(group), "leads": group.leads, "told": shared}, folder / f"{rank}.pt")
        group.wait()
        assert (folder / "0.pt").exists()
        assert (folder / "1.pt").exists()
    assert not torch.distributed.is_initialized()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        port: int = opened.getsockname()[1]
        return port


def test_two_processes_come_to_the_weights_of_one(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, initializer_range=0.1)
    torch.multiprocessing.spawn(member, (free_port(), folder), nprocs=2)
    alone = train_in(ALONE, folder)
    for rank in (0, 1):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)
        assert (found["group"], found["leads"]) == ((rank, 2), rank == 0)
        assert found["told"] == {"seen": 0.0, "only_0": 1.0}
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=1e-6)
        assert found["looked"] == pytest.approx(alone["looked"], rel=1e-5)
        for values, expected in zip(found["values"], alone["values"], strict=True):  # type: ignore[call-overload]
            assert values == pytest.approx(expected, rel=1e-5)
