"""Our own trainer behind the interface of engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from harness1.config import Lora, Train
from harness1.engines.engine import TrainerJob, open_local_engine
from harness1.models.adapters import tensors_of
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.training.algorithm import Cispo
from harness1.training.saving import read_weights
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.train.test_process_group import PLAYED

CARD = Checkpoint(format="compact", counter="c", env={}, env_hash="e", base="b")


@pytest.mark.parametrize("rank", [0, 2])
def test_it_delivers_writes_and_resumes_the_weights_that_it_trains(tmp_path: Path, rank: int) -> None:
    base = save_byte_tokenizer(save_tiny_model(tmp_path / "base"))
    train = Train(lora=Lora(rank=rank), dtype="float32", rate=1e-2, micro_tokens=64)
    engine, resumed = (open_local_engine(TrainerJob(base, Cispo(), train, 4, threads=1)) for _ in range(2))
    engine.step(PLAYED[0])
    delivered: list[tuple[Any, int]] = []

    async def deliver(state: Any, version: int) -> None:
        delivered.append((state, version))

    asyncio.run(engine.publish(7, deliver))
    ((state, version),) = delivered
    assert version == 7
    assert engine.write(tmp_path / "out", CARD) == read_checkpoint(tmp_path / "out")
    written = tensors_of(read_weights(tmp_path / "out"))
    assert all(torch.equal(value, written[name]) for name, value in tensors_of(state).items())
    resumed.load(tmp_path, engine.save(tmp_path))
    assert resumed.step_count == engine.step_count == 1
    assert resumed.step(PLAYED[1]) == engine.step(PLAYED[1])
    assert resumed.logprobs(PLAYED[0]) == engine.logprobs(PLAYED[0])
