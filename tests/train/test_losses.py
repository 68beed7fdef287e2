"""The loss of supervised fine-tuning is a mean over weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness1.errors import UsageError
from harness1.models.causal_model import load_causal_model
from harness1.rows import TrainRow
from harness1.training import trainer as trainer_module
from harness1.training.algorithm import (
    ALGORITHMS,
    Cispo,
    DoubleSided,
    Interaction,
    MicroBatch,
    NegativeLogLikelihood,
    OffPolicyMetrics,
    Reinforce,
    call_means,
    entropies,
    make_algorithm,
)
from harness1.training.process_group import ALONE, ProcessGroup
from harness1.training.trainer import collate
from tests.tiny_models import save_tiny_model
from tests.train.test_cispo import sampled_rows
from tests.train.test_micro_batch import made_rows, plain_logprobs
from tests.train.test_trainer import SMALL, make_trainer, plain_train

PLAIN = TrainRow((5, 6, 7, 8), (0, 1, 0, 1))
WEIGHTED = TrainRow((5, 6, 7), (0, 1, 1), advantages=(3.0, 0.25, 0.5))
"""What stands in advantages where nothing is trained counts nowhere."""


def test_weights_of_trained_tokens_are_summed_and_rows_add_up() -> None:
    algorithm = NegativeLogLikelihood()
    assert (algorithm.normaliser([PLAIN]), algorithm.normaliser([WEIGHTED])) == (2, 0.75)
    assert algorithm.normaliser([PLAIN, WEIGHTED, PLAIN]) == 4.75


def test_the_loss_of_a_token_is_its_weighted_negative_log_probability() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    losses = NegativeLogLikelihood().token_losses(logprobs, collate([PLAIN, WEIGHTED]))
    assert losses.tolist() == [1.0, 2.0, 0.75, 2.0]


def test_algorithms_are_made_by_name() -> None:
    assert make_algorithm("nll") == NegativeLogLikelihood()
    with pytest.raises(UsageError, match=r"no loss 'ppo'; choose one of .*nll"):
        make_algorithm("ppo")
    assert "nll" in ALGORITHMS


LOGPROB = -1.5
"""Of every token, now."""
Calls = Sequence[Sequence[float]]
"""The ratios of the tokens of each call of a row."""
ratios = st.floats(0.02, 40.0)
rows = st.lists(st.lists(st.lists(ratios, min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=4)
bounds = st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 10.0))


def row_of(calls: Calls, context: int = 1) -> TrainRow:
    """A row with context before each of its calls."""
    mask, recorded = [0], [0.0]
    for call in calls:
        mask += [0] * context + [1] * len(call)
        recorded += [0.0] * context + [LOGPROB - math.log(ratio) for ratio in call]
    return TrainRow(tuple(range(len(mask))), tuple(mask), tuple(recorded), (1.0,) * len(mask))


def batch_of(rows: Sequence[Calls]) -> MicroBatch:
    return collate([row_of(calls) for calls in rows])


def weights(algorithm: DoubleSided | Cispo, batch: MicroBatch) -> list[float]:
    found: list[float] = algorithm.importance(torch.full(batch.targets.shape, LOGPROB), batch).tolist()
    return found


def test_three_calls_by_hand() -> None:
    # sqrt(4 * 1/4) = 1, sqrt(2 * 8) = 4 is beyond 3, and a call of one token has its own ratio
    batch = batch_of([[(4.0, 0.25), (2.0, 8.0)], [(0.5,)]])
    assert weights(Interaction(0.25, 3.0), batch) == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.5], rel=1e-5)
    losses = Interaction(0.25, 3.0).token_losses(torch.full((5,), LOGPROB), batch)
    assert losses.tolist() == pytest.approx([1.5, 1.5, 0.0, 0.0, 0.75], rel=1e-5)


@given(rows, bounds)
def test_a_call_has_the_geometric_mean_of_its_ratios_or_is_dropped(
    rows: list[list[list[float]]], bounds: tuple[float, float]
) -> None:
    expected = []
    for call in (call for calls in rows for call in calls):
        mean = math.exp(math.fsum(map(math.log, call)) / len(call))
        if any(abs(mean - bound) < 1e-3 for bound in bounds):
            return
        expected += [mean if bounds[0] < mean < bounds[1] else 0.0] * len(call)
    assert weights(Interaction(*bounds), batch_of(rows)) == pytest.approx(expected, rel=1e-4)


@given(st.lists(ratios, min_size=1, max_size=12), bounds)
def test_calls_of_one_token_are_masked_as_tokens_and_within_the_bounds_weigh_as_in_cispo(
    each: list[float], bounds: tuple[float, float]
) -> None:
    batch = batch_of([[(ratio,) for ratio in each]])
    found = weights(Interaction(*bounds), batch)
    assert found == weights(DoubleSided(*bounds), batch)
    clipped = weights(Cispo(*bounds), batch)
    assert all(weight in (0.0, same) for weight, same in zip(found, clipped, strict=True))
    assert weights(Interaction(0.0, 100.0), batch) == weights(Cispo(0.0, 100.0), batch)


def test_calls_that_touch_across_rows_stay_apart() -> None:
    """The last token of a row and the first of the next may have neighbouring columns."""
    first = TrainRow((1, 2), (0, 1), (0.0, -1.0))
    second = TrainRow((1, 2, 3), (0, 0, 1), (0.0, 0.0, -1.0))
    assert call_means(torch.tensor([1.0, 3.0]), collate([first, second])).tolist() == [1.0, 3.0]


def test_a_token_counts_as_clipped_with_its_call() -> None:
    batch = batch_of([[(4.0, 0.25), (2.0, 8.0)], [(0.5,)]])
    logprobs = torch.full((5,), LOGPROB)
    shares = {}
    for algorithm in (Interaction(0.3, 3.0), DoubleSided(0.3, 3.0)):
        seen = OffPolicyMetrics(algorithm, torch.device("cpu"))
        seen.add(torch.zeros(5, 1), logprobs, batch)
        shares[type(algorithm)] = seen.values(ALONE)["clipped"]
    assert shares == {Interaction: pytest.approx(2 / 5), DoubleSided: pytest.approx(3 / 5)}


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
    for algorithm, clipped in ((Cispo(0.5, 1.4), 0.75), (Reinforce(), 0.0)):
        drift = OffPolicyMetrics(algorithm, torch.device("cpu"))
        add(drift, RATIOS[:1])
        add(drift, RATIOS[1:])
        assert drift.values(ALONE) == pytest.approx(BY_HAND | {"clipped": clipped})


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
    blind = make_trainer(folder, plain_train(micro_tokens=micro_tokens), algorithm=Reinforce())
    watched = make_trainer(folder, plain_train(micro_tokens=micro_tokens), algorithm=Reinforce())
    assert "k3" not in blind.step([msgspec.structs.replace(row, rollout_logprobs=None) for row in rows])
    assert "k3" in watched.step(rows)
    assert all(map(torch.equal, watched.parameters, blind.parameters)), "watching changes no weight"


def test_fine_tuning_does_not_watch_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "OffPolicyMetrics", None)  # it cannot be made
    found = make_trainer(folder, plain_train()).step(made_rows())
    assert found.keys() == {"loss", "gradient", "rate", "trained_tokens"}
