"""What is watched of a step says how far the policy has moved, over all tokens, and fine-tuning has none of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness1.models.causal_model import load_causal_model
from harness1.rows import TrainRow
from harness1.training import trainer as trainer_module
from harness1.training.algorithm import Cispo, OffPolicyMetrics, Reinforce, entropies
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.training.trainer import collate
from tests.tiny_models import save_tiny_model
from tests.train.test_cispo import sampled_rows
from tests.train.test_micro_batch import made_rows, plain_logprobs
from tests.train.test_trainer import SMALL, make_trainer, plain_train

RATIOS = (1.0, 4.0, 0.25, 1.5)
HALVES = torch.tensor([0.5, 0.5, 1e-30]).log().expand(len(RATIOS), 3)
"""Distributions over two tokens that are as likely, and one that there is not."""
BY_HAND = {
    "entropy": math.log(2),
    "k3": (0.0 + (3 - math.log(4)) + (-0.75 + math.log(4)) + (0.5 - math.log(1.5))) / 4,
    "log_ratio_mean": (2 * math.log(4) + math.log(1.5)) / 4,
    "log_ratio_max": math.log(4),
    "ratio_above_2": 0.25,
    "ratio_below_half": 0.25,
    "clipped": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), **SMALL)


def add(drift: OffPolicyMetrics, ratios: tuple[float, ...]) -> None:
    """One pass over tokens of such ratios."""
    trained = len(ratios)
    recorded = (0.0, *(math.log(0.5 / ratio) for ratio in ratios))
    batch = collate([TrainRow((0,) * (trained + 1), (0,) + (1,) * trained, recorded)])
    drift.add(HALVES[:trained], HALVES[:trained, 0], batch)


def test_a_step_of_four_tokens_by_hand() -> None:
    drift = OffPolicyMetrics(Cispo(0.5, 1.4), torch.device("cpu"))
    add(drift, RATIOS[:1])
    add(drift, RATIOS[1:])
    assert drift.values(ALONE) == pytest.approx(BY_HAND | {"clipped": 0.75})


def test_processes_add_up_what_each_has_seen() -> None:
    first, second = (OffPolicyMetrics(Cispo(0.5, 2.0), torch.device("cpu")) for _ in range(2))
    add(first, RATIOS[2:])
    add(second, RATIOS[:2])
    seen = second.values(ALONE)
    largest = seen.pop("log_ratio_max")
    of_second = [torch.tensor([2.0, *(2 * mean for mean in seen.values())]), torch.tensor([0.0, largest + 1])]

    class Two(ProcessGroup):
        def add_up(self, values: Tensor) -> None:
            values += of_second.pop(0)

    assert first.values(Two(0, 2)) == pytest.approx(BY_HAND | {"log_ratio_max": largest + 1})


def test_nothing_is_clipped_where_there_are_no_bounds() -> None:
    drift = OffPolicyMetrics(Reinforce(), torch.device("cpu"))
    add(drift, RATIOS)
    assert drift.values(ALONE)["clipped"] == 0.0


def test_entropies_are_those_of_torch_however_many_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(600, 7)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies(logits.log_softmax(-1)), expected)


@pytest.mark.parametrize("micro_tokens", [30, 10_000])
def test_a_step_tells_how_far_the_weights_before_it_are_from_the_rollouts(folder: Path, micro_tokens: int) -> None:
    model = load_causal_model(folder, "cpu", "float32")
    rows = sampled_rows(model)
    trainer = make_trainer(folder, plain_train(micro_tokens=micro_tokens), algorithm=Cispo(0.5, 1.5))
    with torch.no_grad():
        now = torch.cat([plain_logprobs(model, row) for row in rows])
        logits = [model(input_ids=torch.tensor([row.token_ids])).logits[0, :-1] for row in rows]
    masks = [torch.tensor(row.loss_mask[1:], dtype=torch.bool) for row in rows]
    every = torch.cat([each[mask] for each, mask in zip(logits, masks, strict=True)])
    then = torch.cat(
        [torch.tensor((row.rollout_logprobs or ())[1:])[mask] for row, mask in zip(rows, masks, strict=True)]
    )
    logs = now - then
    ratios = logs.exp()
    found = trainer.step(rows)
    expected = {
        "entropy": torch.distributions.Categorical(logits=every).entropy().mean(),
        "k3": (ratios - 1 - logs).mean(),
        "log_ratio_mean": logs.abs().mean(),
        "log_ratio_max": logs.abs().max(),
        "ratio_above_2": (ratios > 2).float().mean(),
        "ratio_below_half": (ratios < 0.5).float().mean(),
        "clipped": ((ratios < 0.5) | (ratios > 1.5)).float().mean(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-4
    )
    assert 0 < found["ratio_above_2"] < found["clipped"] < 1


def test_fine_tuning_does_not_watch_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "OffPolicyMetrics", None)  # it cannot be made
    found = make_trainer(folder, plain_train()).step(made_rows())
    assert found.keys() == {"loss", "gradient", "rate", "trained_tokens"}


def test_watching_changes_no_weight(folder: Path) -> None:
    model = load_causal_model(folder, "cpu", "float32")
    rows = sampled_rows(model)
    watched, blind = (make_trainer(folder, plain_train(), algorithm=Reinforce()) for _ in range(2))
    unknown = [TrainRow(row.token_ids, row.loss_mask, None, row.advantages) for row in rows]
    same = [TrainRow(row.token_ids, row.loss_mask, row.rollout_logprobs, row.advantages) for row in rows]
    assert "k3" in watched.step(same)
    assert "k3" not in blind.step(unknown)
    assert all(map(torch.equal, watched.parameters, blind.parameters))
