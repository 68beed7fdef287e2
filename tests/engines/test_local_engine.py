"""Our own trainer behind the interface of engines: the same calls, to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness1.config import Lora, Train
from harness1.engines.engine import LocalEngine, TrainerJob
from harness1.models.adapters import tensors_of
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.training.algorithm import Cispo
from harness1.training.saving import write_model
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.train.test_process_group import PLAYED

CARD = Checkpoint(format="compact", counter="c", env={}, env_hash="e", base="b")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_byte_tokenizer(folder)
    return save_tiny_model(folder)


def pair(base: Path, rank: int) -> tuple[LocalEngine, Trainer]:
    """An engine, and the plain parts that it is made of."""
    train = Train(lora=Lora(rank=rank), dtype="float32", rate=1e-2, micro_tokens=64)
    engine = LocalEngine(TrainerJob(base, Cispo(), train, 4, threads=1))
    return engine, Trainer(load_trainable(base, train, "cpu"), Cispo(), train, 4)


def published(engine: LocalEngine, version: int) -> tuple[dict[str, torch.Tensor], int]:
    seen: list[tuple[dict[str, torch.Tensor], int]] = []

    async def deliver(state: Mapping[str, Any], named: int) -> None:
        seen.append(({name: value.clone() for name, value in tensors_of(state).items()}, named))

    asyncio.run(engine.publish(version, deliver))
    (found,) = seen
    return found


@pytest.mark.parametrize("rank", [0, 2])
def test_steps_logs_and_weights_are_those_of_the_trainer_to_the_bit(base: Path, tmp_path: Path, rank: int) -> None:
    engine, trainer = pair(base, rank)
    for rows in PLAYED:
        assert engine.step(rows) == trainer.step(rows)
    assert engine.step_count == trainer.step_count == len(PLAYED)
    assert engine.logprobs(PLAYED[0]) == trainer.logprobs(PLAYED[0])
    assert engine.loss(PLAYED[0]) == trainer.loss(PLAYED[0])
    ours, version = published(engine, 7)
    expected = tensors_of(trainer.weights())
    assert version == 7
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    assert engine.write(tmp_path / "engine", CARD) == read_checkpoint(tmp_path / "engine")
    write_model(tmp_path / "plain", trainer.model, trainer.weights(), base, CARD)
    saved = "adapter_model.safetensors" if rank else "model.safetensors"
    one, other = (load_file(tmp_path / name / saved) for name in ("engine", "plain"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_saved_engine_continues_as_if_it_had_not_stopped(base: Path, tmp_path: Path) -> None:
    engine, trainer = pair(base, 2)
    for rows in PLAYED[:2]:
        engine.step(rows)
        trainer.step(rows)
    resumed, _ = pair(base, 2)
    resumed.load(tmp_path, engine.save(tmp_path))
    assert resumed.step(PLAYED[2]) == trainer.step(PLAYED[2])
