"""The watch between steps: what it looks at, with whose weights, and what it leaves alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from harness1.config import Config, Lora, Validation
from harness1.engines.engine import LocalEngine, TrainerJob, open_local_engine
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.records import Sampling
from harness1.rows import RowFile
from harness1.sft import train as held_out
from harness1.sft.data_card import HELD_OUT, TRAIN, read_card
from harness1.sft.train import HeldOutValidation, Student, pick_turns
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.trainable import load_trainable
from tests.sft.test_fine_tuning import CONFIG, QUICK, Place, save_rows, save_student
from tests.support import run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    home = tmp_path_factory.mktemp("held_out")
    return save_rows(home, save_student(home / "model"))


@pytest.fixture(scope="module")
def student(place: Place) -> Student:
    return Student.of(place.model, read_card(place.rows))


def watching(student: Student, place: Place, watch: Validation) -> HeldOutValidation:
    config: Config = msgspec.structs.replace(CONFIG, train=msgspec.structs.replace(QUICK, watch=watch))
    return HeldOutValidation(student, RowFile(place.rows / HELD_OUT), config, "cpu")


def training(place: Place, rank: int = 0) -> LocalEngine:
    train = msgspec.structs.replace(QUICK, lora=Lora(rank=rank), rate=1e-2)
    return open_local_engine(TrainerJob(place.model, NegativeLogLikelihood(), train, 3))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[TransformersBackend]:
    found: list[TransformersBackend] = []

    def opening(*arguments: Any, **options: Any) -> TransformersBackend:
        found.append(open_transformers(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(held_out, "open_transformers", opening)
    return found


def test_a_look_at_rows_alone_needs_no_second_model_and_without_rows_nothing_is_seen(
    place: Place, student: Student, tmp_path: Path, opened: list[TransformersBackend]
) -> None:
    engine = training(place)
    found = run(watching(student, place, Validation(rows=1, turns=0)).validate(engine))
    assert found == {"nll": pytest.approx(engine.loss([RowFile(place.rows / HELD_OUT)[0]]))}
    (tmp_path / HELD_OUT).write_bytes(b"")
    watch = HeldOutValidation(
        student, RowFile(tmp_path / HELD_OUT), msgspec.structs.replace(CONFIG, train=QUICK), "cpu"
    )
    assert run(watch.validate(training(place))) == {}
    assert opened == []


def test_a_look_measures_rows_turns_and_episodes_and_counts_those_that_broke(
    place: Place, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: object) -> list[dict[str, float]]:
        return []

    found = run(watching(student, place, Validation(rows=2, turns=1, tasks=1)).validate(training(place)))
    turns = {"valid", "tool_agreement", "action_agreement"}
    episodes = {"curated_recall", "set_size", "turns", "format_failures"}
    assert found.keys() == {"nll", *turns, *episodes}
    assert (found["valid"], found["format_failures"], found["curated_recall"]) == (0.0, 1.0, 0.0)
    monkeypatch.setattr(held_out, "episode_results", none)
    found = run(watching(student, place, Validation(rows=2, turns=1, tasks=1)).validate(training(place)))
    assert (found["faults"], "curated_recall" in found) == (1.0, False)


@pytest.mark.parametrize("rank", [0, 2])
def test_each_look_samples_from_the_weights_of_that_step_and_changes_none(
    place: Place, student: Student, opened: list[TransformersBackend], rank: int
) -> None:
    rows = list(RowFile(place.rows / TRAIN))
    (turn,) = pick_turns(rows, 1)
    watch, engine = watching(student, place, Validation(rows=1, turns=1)), training(place, rank)
    before = [parameter.detach().clone() for parameter in engine.parameters]
    run(watch.validate(engine))
    assert all(map(torch.equal, before, engine.parameters))
    engine.step(rows)
    run(watch.validate(engine))
    (backend,) = opened
    said = asyncio.run(backend.generate(turn.prompt_ids, Sampling(max_tokens=1, seed=1)))

    def logprob(model: Any) -> float:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([turn.prompt_ids]), use_cache=False).logits[0, -1]
        return float(logits.log_softmax(-1)[said.output_ids[0]])

    assert said.output_logprobs[0] == pytest.approx(logprob(engine.model), abs=1e-4)
    assert abs(logprob(engine.model) - logprob(load_trainable(place.model, QUICK, "cpu"))) > 1e-2
    assert (said.version_start, said.version_end) == (1, 1)
