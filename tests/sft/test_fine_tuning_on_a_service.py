"""Fine-tuning on a service of the Tinker API: the weights and figures of our own trainer, also by the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from harness1.config import Lora, Machine
from harness1.engines.engine import Engine, OpenEngine, TrainerJob, open_local_engine, open_service_engine
from harness1.engines.tinker import TinkerBackend, connect, tinker_service
from harness1.models.checkpoint import read_checkpoint
from harness1.sft.train import FineTuning, fine_tune
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.process_group import ProcessGroup
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer
from tests.cli.commands import command_in_process
from tests.engines.fake_tinker import MODEL, FakeTinker
from tests.sft.test_fine_tuning import QUICK, SHORT, SMALL, Place, silent, timeless, tuning

TRAIN = msgspec.structs.replace(QUICK, lora=Lora(rank=4, alpha=4.0))
ADDRESS = f"tinker:{MODEL}@http://localhost:1"
OWN = {"gradient", "memory"}
"""What our own trainer alone measures, or a service under a name of its own."""


@pytest.fixture(autouse=True)
def large_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller epsilon, Adam makes much of the rounding of gradients that are next to 0."""
    for module in ("engines.tinker", "training.trainer"):
        monkeypatch.setattr(f"harness1.{module}.EPSILON", 1e-4)


def on_service(place: Place, out: Path, sdk: FakeTinker, kept: list[Any]) -> FineTuning:
    sampler = TinkerBackend(connect(MODEL, "http://localhost:1", Machine(), sdk))
    work = tuning(place, out, TRAIN, sampler=sampler)
    return replace(work, open_engine=keeping(kept, partial(open_service_engine, tinker_service(sampler), work.config)))


def keeping(kept: list[Any], opened: OpenEngine) -> OpenEngine:

    def opens(job: TrainerJob, group: ProcessGroup) -> Engine:
        engine = opened(job, group)
        kept.append(engine)
        return engine

    return opens


def figures(out: Path) -> list[dict[str, float]]:
    """The log, without times and without what only one of the engines has."""
    return [
        {name: value for name, value in line.items() if name not in OWN and not name.startswith("service/")}
        for line in timeless(out)
    ]


def distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(some, others, strict=True))


def test_weights_and_held_out_figures_are_those_of_our_trainer(place: Place, tmp_path: Path) -> None:
    sdk, kept = FakeTinker(place.model, TRAIN), list[Any]()
    card = fine_tune(on_service(place, tmp_path / "service", sdk, kept), silent)
    local = tuning(place, tmp_path / "local", TRAIN, open_engine=keeping(kept, open_local_engine))
    begun = Trainer(load_trainable(place.model, TRAIN, "cpu"), NegativeLogLikelihood(), TRAIN, 1).parameters
    ours = fine_tune(local, silent)
    trained, expected = kept[0]._training.trainer.parameters, kept[1].parameters
    assert distance(trained, expected) < 1e-6
    assert distance(begun, expected) > 1e-3
    lines, known = figures(tmp_path / "service"), figures(tmp_path / "local")
    assert [line.keys() for line in lines] == [line.keys() for line in known]
    for line, expected_line in zip(lines, known, strict=True):
        assert line == pytest.approx(expected_line, abs=1e-5)
    assert {"loss", "held_out/nll", "held_out/valid"} <= {name for line in lines for name in line}
    assert card.metrics == pytest.approx(ours.metrics, abs=1e-5)
    assert card.remote in sdk.states


def test_the_command_trains_on_the_service_once(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sdk = FakeTinker(place.model, TRAIN)
    monkeypatch.setitem(sys.modules, "tinker", cast(Any, sdk))
    harness1 = command_in_process(monkeypatch, capsys)
    asked = ("batch_rows=2", "epochs=1", "lora.rank=4", "watch.every=2", "watch.rows=2", "watch.turns=1")
    settings = [word for each in (*SHORT, *(f"train.{each}" for each in asked)) for word in ("--set", each)]
    words = ("sft", "train", str(place.rows), "--model", str(place.model), "--out", str(tmp_path / "student"))
    ended = harness1(*words, "--engine", ADDRESS, "--config", SMALL, *settings, "--json")
    assert ended.code == 0, ended.err
    card, found = read_checkpoint(tmp_path / "student"), json.loads(ended.out)
    assert card.remote in sdk.states
    assert {"nll", "valid"} <= found["metrics"].keys()
    sent = len(sdk.sent)
    again = harness1(*words, "--engine", ADDRESS, "--config", SMALL, *settings, "--json")
    assert (json.loads(again.out), len(sdk.sent)) == (found, sent)
    refused = harness1(*words, "--engine", ADDRESS, "--trainer", "trl", "--config", SMALL, *settings)
    assert refused.code == 2
    assert "give one of them" in refused.err
