"""Each loss is what its formula says, however rows are cut, and a step tells how far the weights have moved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness1.config import Rl
from harness1.errors import UsageError
from harness1.models.causal_model import load_causal_model
from harness1.rows import TrainRow, per_request, prefix_merging
from harness1.rows.calls import CapturedCall
from harness1.training.algorithm import (
    LOG_RATIO_LIMIT,
    LOSSES,
    Cispo,
    DoubleSided,
    Interaction,
    MicroBatch,
    NegativeLogLikelihood,
    OffPolicyMetrics,
    Reinforce,
    entropies,
    make_algorithm,
)
from harness1.training.process_group import ALONE
from harness1.training.trainer import collate
from tests.tiny_models import VOCABULARY, save_tiny_model
from tests.train.test_trainer import LENGTHS, SMALL, distance, gradient_of, make_trainer, plain_logprobs, plain_train

NARROW: tuple[Reinforce, ...] = (Cispo(0.5, 1.5), DoubleSided(0.5, 1.5), Interaction(0.5, 1.5), Reinforce())
each_algorithm = pytest.mark.parametrize("algorithm", NARROW, ids=lambda each: type(each).__name__)
RATIOS = (0.01, 0.3, 0.5001, 0.8, 1.0, 1.1, 1.4999, 1.7, 3.0, 4.5, 5.5, 40.0)
PLAIN = TrainRow((5, 6, 7, 8), (0, 1, 0, 1))
WEIGHTED = TrainRow((5, 6, 7), (0, 1, 1), advantages=(3.0, 0.25, 0.5))
"""What stands in advantages where nothing is trained counts nowhere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_causal_model(folder, "cpu", "float32")


def test_fine_tuning_is_the_mean_of_weighted_negative_log_probabilities() -> None:
    algorithm = make_algorithm("nll")
    assert algorithm == NegativeLogLikelihood()
    assert (algorithm.normaliser([PLAIN]), algorithm.normaliser([WEIGHTED])) == (2, 0.75)
    assert algorithm.normaliser([PLAIN, WEIGHTED, PLAIN]) == 4.75
    losses = algorithm.token_losses(torch.tensor([-1.0, -2.0, -3.0, -4.0]), collate([PLAIN, WEIGHTED]))
    assert losses.tolist() == [1.0, 2.0, 0.75, 2.0]


class Added(NegativeLogLikelihood):
    """A loss of one's own."""


def test_algorithms_are_made_by_name_with_the_bounds_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    rl = Rl(ratio=(0.25, 3.0))
    made = [make_algorithm(name, rl) for name in ("cispo", "double_sided", "interaction", "reinforce")]
    assert made == [Cispo(0.25, 3.0), DoubleSided(0.25, 3.0), Interaction(0.25, 3.0), Reinforce()]
    assert make_algorithm("cispo") == Cispo(0.0, 5.0)
    monkeypatch.setitem(LOSSES, "added", Added)
    assert type(make_algorithm("added", rl)) is Added
    with pytest.raises(UsageError, match=r"no loss 'ppo'; choose one of .*nll"):
        make_algorithm("ppo")


def weight_by_hand(algorithm: Reinforce, ratio: float) -> float:
    if isinstance(algorithm, Cispo):
        return min(max(ratio, 0.5), 1.5)
    if isinstance(algorithm, Interaction):  # the tokens are one call
        ratio = math.prod(RATIOS) ** (1 / len(RATIOS))
    return (ratio if 0.5 < ratio < 1.5 else 0.0) if isinstance(algorithm, DoubleSided) else 1.0


@each_algorithm
def test_gradients_are_those_of_finite_differences_with_the_weights_held_still(algorithm: Reinforce) -> None:
    torch.manual_seed(0)
    trained, theta = len(RATIOS), torch.randn(len(RATIOS), 5, dtype=torch.float64)
    targets = torch.arange(trained)[:, None] % 5
    advantages = torch.tensor([(-1) ** at * (0.3 + at / 7) for at in range(trained)], dtype=torch.float64)
    counts = torch.linspace(0.2, 2.0, trained, dtype=torch.float64)

    def logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, targets)[:, 0]

    batch = dataclasses.replace(
        collate([TrainRow(tuple(range(trained + 1)), (0,) + (1,) * trained)]),
        weights=advantages,
        rollout_logprobs=logprobs(theta) - torch.tensor(RATIOS, dtype=torch.float64).log(),
        token_weights=counts,
    )
    held = torch.tensor([weight_by_hand(algorithm, ratio) for ratio in RATIOS], dtype=torch.float64)

    def surrogate(logits: Tensor) -> float:
        return -float((held * advantages * counts * logprobs(logits)).sum())

    given = theta.clone().requires_grad_()
    loss = algorithm.token_losses(logprobs(given), batch).sum()
    loss.backward()
    assert loss.item() == pytest.approx(surrogate(theta), rel=1e-12)
    step, expected = 1e-6, torch.zeros_like(theta)
    for place in range(theta.numel()):
        moved = torch.zeros_like(theta).flatten()
        moved[place] = step
        moved = moved.view_as(theta)
        expected.view(-1)[place] = (surrogate(theta + moved) - surrogate(theta - moved)) / (2 * step)
    assert given.grad is not None
    torch.testing.assert_close(given.grad, expected, rtol=0, atol=1e-8)


def sampled_rows(model: PreTrainedModel, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[TrainRow]:
    """Rows whose policy has moved, with ratios from about 0.2 to 5, of any advantages and token weights."""
    random, rows = Random(seed), []
    for length in lengths:
        ids = tuple(random.randrange(VOCABULARY) for _ in range(length))
        mask = tuple(int(place >= 3 and place % 7 != 0) for place in range(length))
        with torch.no_grad():
            known = iter(plain_logprobs(model, TrainRow(ids, mask)).tolist())
        then = tuple(next(known) + random.gauss(0, 0.7) if each else 0.0 for each in mask)
        advantages = tuple(random.gauss(0, 1) for _ in ids)
        rows.append(TrainRow(ids, mask, then, advantages, token_weight=random.uniform(0.1, 2.0)))
    return rows


@each_algorithm
def test_neither_passes_nor_order_change_gradients(folder: Path, model: PreTrainedModel, algorithm: Reinforce) -> None:
    rows = sampled_rows(model)
    expected = gradient_of(folder, rows, algorithm)
    for micro_tokens in (1, 30, 50):
        shuffled = Random(micro_tokens).sample(rows, len(rows))
        assert distance(gradient_of(folder, shuffled, algorithm, micro_tokens=micro_tokens), expected) < 1e-6


@each_algorithm
def test_rows_of_turns_and_chains_have_one_gradient(folder: Path, model: PreTrainedModel, algorithm: Reinforce) -> None:
    """Three turns, of which every prompt continues what was before."""
    row, *_ = sampled_rows(model, 3, (40,))
    ids, logprobs = row.token_ids, tuple(value or -3.0 for value in row.rollout_logprobs or ())
    parts = ((4, 8), (12, 16), (20, 26))
    calls = [CapturedCall(f"{begin}", ids[:begin], ids[begin:end], logprobs[begin:end]) for begin, end in parts]
    stamped = [
        [msgspec.structs.replace(row, advantages=(-0.7,) * len(row.token_ids), token_weight=0.2) for row in rows]
        for rows in (per_request(calls), prefix_merging(calls).rows)
    ]
    assert [len(rows) for rows in stamped] == [3, 1]
    assert algorithm.normaliser(stamped[0]) == pytest.approx(algorithm.normaliser(stamped[1]))
    found, expected = (gradient_of(folder, rows, algorithm, micro_tokens=1) for rows in stamped)
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_the_ratio_of_a_token_that_was_all_but_impossible_is_finite(gap: float) -> None:
    batch = dataclasses.replace(collate([TrainRow((1, 2), (0, 1))]), rollout_logprobs=torch.tensor([-1e4 - gap]))
    logprobs = torch.tensor([-1e4], requires_grad=True)
    Cispo(0.0, math.inf).token_losses(logprobs, batch).sum().backward()
    assert logprobs.grad is not None
    assert -float(logprobs.grad) == pytest.approx(math.exp(math.copysign(LOG_RATIO_LIMIT, gap)))


def test_token_weights_of_trained_tokens_are_what_the_loss_is_divided_by() -> None:
    rows = [TrainRow((1, 2, 3), (0, 1, 1), token_weight=0.25), TrainRow((1, 2), (0, 1), token_weight=2.0)]
    assert [algorithm.normaliser(rows) for algorithm in NARROW] == [2.5] * len(NARROW)
    assert Reinforce().token_losses(torch.tensor([-1.0, -2.0, -3.0]), collate(rows)).tolist() == [0.25, 0.5, 6.0]


@pytest.mark.parametrize("algorithm", NARROW[:3], ids=lambda each: type(each).__name__)
def test_rows_without_recorded_log_probabilities_are_refused_by_those_that_need_them(algorithm: Reinforce) -> None:
    with pytest.raises(UsageError, match="rollout_logprobs"):
        algorithm.token_losses(torch.tensor([-1.0]), collate([PLAIN]))


LOGPROB = -1.5  # of every token, now


def batch_of(*rows: Sequence[Sequence[float]]) -> MicroBatch:
    """Rows of calls, each by the ratios of its tokens, with context before it."""
    made = []
    for calls in rows:
        mask = [value for call in calls for value in (0, *[1] * len(call))]
        recorded = [value for call in calls for value in (0.0, *(LOGPROB - math.log(ratio) for ratio in call))]
        made.append(TrainRow(tuple(range(len(mask))), tuple(mask), tuple(recorded), (1.0,) * len(mask)))
    return collate(made)


def test_a_call_has_the_geometric_mean_of_its_ratios_or_is_dropped_and_counts_as_clipped() -> None:
    """sqrt(4 * 1/4) = 1, sqrt(2 * 8) = 4 is beyond 3, and a call of one token has its own ratio. The last row's call
    begins in the column behind that of the token before."""
    batch, logprobs = batch_of([(4.0, 0.25), (2.0, 8.0)], [(0.5,)], [(), (2.0, 2.0)]), torch.full((7,), LOGPROB)
    losses = Interaction(0.25, 3.0).token_losses(logprobs, batch)
    assert losses.tolist() == pytest.approx([1.5, 1.5, 0.0, 0.0, 0.75, 3.0, 3.0], rel=1e-5)
    shares = {}
    for algorithm in (Interaction(0.3, 3.0), DoubleSided(0.3, 3.0)):
        seen = OffPolicyMetrics(algorithm, torch.device("cpu"))
        seen.add(torch.zeros(7, 1), logprobs, batch)
        shares[type(algorithm)] = seen.values(ALONE)["clipped"]
    assert shares == {Interaction: pytest.approx(2 / 7), DoubleSided: pytest.approx(3 / 7)}


FOUR = (1.0, 4.0, 0.25, 1.5)
BY_HAND = {
    "entropy": math.log(2),
    "k3": (0.0 + (3 - math.log(4)) + (-0.75 + math.log(4)) + (0.5 - math.log(1.5))) / 4,
    "log_ratio_mean": (2 * math.log(4) + math.log(1.5)) / 4,
    "log_ratio_max": math.log(4),
    "ratio_above_2": 0.25,
    "ratio_below_half": 0.25,
    "clipped": 0.5,
}


def add(drift: OffPolicyMetrics, ratios: tuple[float, ...]) -> None:
    """One pass over tokens of such ratios, each one of two that are as likely; a third is next to impossible."""
    halves = torch.tensor([0.5, 0.5, 1e-30]).log().expand(len(ratios), 3)
    recorded = (0.0, *(math.log(0.5 / ratio) for ratio in ratios))
    row = TrainRow((0,) * (len(ratios) + 1), (0,) + (1,) * len(ratios), recorded)
    drift.add(halves, halves[:, 0], collate([row]))


def test_how_far_four_tokens_have_moved_by_hand() -> None:
    for algorithm, clipped in ((Cispo(0.5, 1.4), 0.75), (Reinforce(), 0.0)):
        drift = OffPolicyMetrics(algorithm, torch.device("cpu"))
        add(drift, FOUR[:1])
        add(drift, FOUR[1:])
        assert drift.values(ALONE) == pytest.approx(BY_HAND | {"clipped": clipped})


def test_entropies_are_those_of_torch_however_many_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(600, 7)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies(logits.log_softmax(-1)), expected)


@pytest.mark.parametrize("micro_tokens", [30, 10_000])
def test_a_step_tells_how_far_weights_have_moved(folder: Path, model: PreTrainedModel, micro_tokens: int) -> None:
    rows, plain = sampled_rows(model), plain_train(micro_tokens=micro_tokens)
    found = make_trainer(folder, plain, algorithm=Cispo(0.5, 1.5)).step(rows)
    then = torch.tensor([value for row in rows for value in (row.rollout_logprobs or ()) if value])
    with torch.no_grad():
        logs = torch.cat([plain_logprobs(model, row) for row in rows]) - then
    ratios = logs.exp()
    expected = {"k3": (ratios - 1 - logs).mean(), "clipped": ((ratios < 0.5) | (ratios > 1.5)).float().mean()}
    expected |= {"log_ratio_mean": logs.abs().mean(), "log_ratio_max": logs.abs().max()}
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-4
    )
    blind, watched = (make_trainer(folder, plain, algorithm=Reinforce()) for _ in range(2))
    assert "k3" not in blind.step([msgspec.structs.replace(row, rollout_logprobs=None) for row in rows])
    assert "k3" in watched.step(rows)
    assert all(map(torch.equal, watched.parameters, blind.parameters)), "watching changes no weight"
