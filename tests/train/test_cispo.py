"""Each policy gradient is what its formula says, as its peers compute it, however rows are cut."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from harness1.config import Rl
from harness1.errors import UsageError
from harness1.models.causal_model import load_causal_model
from harness1.rows import TrainRow, per_request, prefix_merging
from harness1.rows.calls import CapturedCall
from harness1.training.algorithm import (
    LOG_RATIO_LIMIT,
    Cispo,
    DoubleSided,
    Interaction,
    MicroBatch,
    PolicyGradient,
    Reinforce,
    make_algorithm,
)
from harness1.training.trainer import collate, compute_logprobs
from tests.tiny_models import VOCABULARY, save_tiny_model
from tests.train.test_micro_batch import LENGTHS, hidden_gradients, plain_logprobs, predicting_positions
from tests.train.test_trainer import SMALL, distance, gradient_of

NARROW: tuple[PolicyGradient, ...] = (Cispo(0.5, 1.5), DoubleSided(0.5, 1.5), Interaction(0.5, 1.5), Reinforce())
RATIOS = (0.01, 0.3, 0.5001, 0.8, 1.0, 1.1, 1.4999, 1.7, 3.0, 4.5, 5.5, 40.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_causal_model(folder, "cpu", "float32")


def batch_of(ratios: Sequence[float], advantages: Sequence[float], logprobs: Tensor, **fields: Any) -> MicroBatch:
    """Tokens whose ratios are given, in double precision."""
    trained = len(ratios)
    row = TrainRow(tuple(range(trained + 1)), (0,) + (1,) * trained)
    return dataclasses.replace(
        collate([row]),
        weights=torch.tensor(advantages, dtype=torch.float64),
        rollout_logprobs=logprobs - torch.tensor(ratios, dtype=torch.float64).log(),
        **{"token_weights": torch.ones(trained, dtype=torch.float64), **fields},
    )


def sampled_rows(model: PreTrainedModel, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[TrainRow]:
    """Rows whose policy has moved, with ratios from about 0.2 to 5, of any advantages and token weights."""
    random = Random(seed)
    rows = []
    for length in lengths:
        ids = tuple(random.randrange(VOCABULARY) for _ in range(length))
        mask = tuple(int(place >= 3 and place % 7 != 0) for place in range(length))
        with torch.no_grad():
            known = iter(plain_logprobs(model, TrainRow(ids, mask)).tolist())
        rows.append(
            TrainRow(
                ids,
                mask,
                tuple(next(known) + random.gauss(0, 0.7) if each else 0.0 for each in mask),
                tuple(random.gauss(0, 1) for _ in ids),
                token_weight=random.uniform(0.1, 2.0),
            )
        )
    return rows


def weight_by_hand(algorithm: PolicyGradient, ratio: float) -> float:
    if isinstance(algorithm, Cispo):
        return min(max(ratio, 0.5), 1.5)
    if isinstance(algorithm, Interaction):  # the tokens are one call
        ratio = math.prod(RATIOS) ** (1 / len(RATIOS))
    return (ratio if 0.5 < ratio < 1.5 else 0.0) if isinstance(algorithm, DoubleSided) else 1.0


@pytest.mark.parametrize("algorithm", NARROW, ids=lambda each: type(each).__name__)
def test_gradients_are_those_of_finite_differences_with_the_weights_held_still(algorithm: PolicyGradient) -> None:
    torch.manual_seed(0)
    theta = torch.randn(len(RATIOS), 5, dtype=torch.float64)
    targets = torch.arange(len(RATIOS))[:, None] % 5
    advantages = [(-1) ** at * (0.3 + at / 7) for at in range(len(RATIOS))]
    counts = torch.linspace(0.2, 2.0, len(RATIOS), dtype=torch.float64)

    def logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, targets)[:, 0]

    batch = batch_of(RATIOS, advantages, logprobs(theta), token_weights=counts)
    held = torch.tensor([weight_by_hand(algorithm, ratio) for ratio in RATIOS], dtype=torch.float64)
    held = held * torch.tensor(advantages, dtype=torch.float64) * counts

    def surrogate(logits: Tensor) -> float:
        return -float((held * logprobs(logits)).sum())

    given = theta.clone().requires_grad_()
    loss = algorithm.token_losses(logprobs(given), batch).sum()
    loss.backward()
    assert loss.item() == pytest.approx(surrogate(theta), rel=1e-12)
    step = 1e-6
    expected = torch.zeros_like(theta)
    for place in range(theta.numel()):
        moved = torch.zeros_like(theta).flatten()
        moved[place] = step
        moved = moved.view_as(theta)
        expected.view(-1)[place] = (surrogate(theta + moved) - surrogate(theta - moved)) / (2 * step)
    assert given.grad is not None
    torch.testing.assert_close(given.grad, expected, rtol=0, atol=1e-8)


def test_losses_of_three_tokens_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    batch = batch_of((8.0, 2.0, 0.25), (1.0, -0.5, 2.0), logprobs)
    batch = dataclasses.replace(batch, token_weights=torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64))
    found = {
        name: algorithm.token_losses(logprobs, batch).tolist()
        for name, algorithm in (
            ("cispo", Cispo(0.5, 5.0)),
            ("double_sided", DoubleSided(0.5, 5.0)),
            ("reinforce", Reinforce()),
        )
    }
    assert found["cispo"] == pytest.approx([5.0, -2.0, 0.3])
    assert found["double_sided"] == pytest.approx([0.0, -2.0, 0.0])
    assert found["reinforce"] == pytest.approx([1.0, -1.0, 0.6])


def trl_trainer(epsilon_high: float) -> Any:
    """What TRL's loss reads of its trainer, in training, without anything that would be added to it."""
    accelerator = SimpleNamespace(
        num_processes=1, is_main_process=False, autocast=nullcontext, reduce=lambda each, reduction: each
    )
    made = SimpleNamespace(
        accelerator=accelerator,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="cispo",
        epsilon_high=epsilon_high,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(steps_per_generation=1),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    made._get_per_token_logps_and_entropies = partial(GRPOTrainer._get_per_token_logps_and_entropies, made)
    return made


def trl_inputs(rows: Sequence[TrainRow], prompt: int) -> dict[str, Tensor]:
    """Rows with prompts of one length as TRL takes them: a completion padded on the right, an advantage for each."""
    longest = max(len(row.token_ids) for row in rows)
    ids, mask, old = (torch.zeros(len(rows), longest, dtype=kind) for kind in (torch.long, torch.long, torch.float))
    for at, row in enumerate(rows):
        ids[at, : len(row.token_ids)] = torch.tensor(row.token_ids)
        mask[at, : len(row.token_ids)] = torch.tensor(row.loss_mask)
        old[at, : len(row.token_ids)] = torch.tensor(row.rollout_logprobs)
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones_like(ids[:, :prompt]),
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": torch.tensor([(row.advantages or (0.0,))[-1] for row in rows]),
        "old_per_token_logps": old[:, prompt:],
        "num_items_in_batch": mask.sum(),
    }


@pytest.mark.parametrize("bound", [0.9, 2.0])
def test_on_single_turns_loss_and_gradient_are_those_of_trl(folder: Path, model: PreTrainedModel, bound: float) -> None:
    rows = []
    for row in sampled_rows(model):
        mask = (0,) * 4 + (1,) * (len(row.token_ids) - 4)
        logprobs = tuple((row.rollout_logprobs or ())[at] or -4.0 if each else 0.0 for at, each in enumerate(mask))
        advantages = ((row.advantages or ())[0],) * len(mask)
        rows.append(TrainRow(row.token_ids, mask, logprobs, advantages))
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    add_fused_lm_head(theirs, outputs=("log_probs", "entropy"))
    trainer = trl_trainer(bound)
    expected = GRPOTrainer._compute_loss(trainer, theirs, trl_inputs(rows, 4))
    expected.backward()
    assert trainer._metrics["train"]["cispo_clip_ratio"][0] > 0
    algorithm = Cispo(0.0, bound)
    batch = collate(rows)
    losses = algorithm.token_losses(compute_logprobs(model, batch), batch)
    assert losses.sum().item() / algorithm.normaliser(rows) == pytest.approx(expected.item(), rel=1e-5)
    flat = torch.cat([parameter.grad.flatten() for parameter in theirs.parameters()])
    assert distance(gradient_of(folder, rows, algorithm), flat) < 1e-5


@pytest.mark.parametrize("algorithm", NARROW, ids=lambda each: type(each).__name__)
def test_neither_passes_nor_the_order_of_rows_change_the_gradient(
    folder: Path, model: PreTrainedModel, algorithm: PolicyGradient
) -> None:
    rows = sampled_rows(model)
    expected = gradient_of(folder, rows, algorithm)
    for micro_tokens in (1, 30, 50):
        shuffled = Random(micro_tokens).sample(rows, len(rows))
        assert distance(gradient_of(folder, shuffled, algorithm, micro_tokens=micro_tokens), expected) < 1e-6


def episode_calls(model: PreTrainedModel) -> list[CapturedCall]:
    """Three turns, of which every prompt continues what was before."""
    row, *_ = sampled_rows(model, 3, (40,))
    ids, logprobs = row.token_ids, tuple(value or -3.0 for value in row.rollout_logprobs or ())
    return [
        CapturedCall(f"{begin}", ids[:begin], ids[begin:end], logprobs[begin:end])
        for begin, end in ((4, 8), (12, 16), (20, 26))
    ]


@pytest.mark.parametrize("algorithm", NARROW, ids=lambda each: type(each).__name__)
def test_rows_of_turns_and_of_chains_have_the_same_gradient(
    folder: Path, model: PreTrainedModel, algorithm: PolicyGradient
) -> None:
    calls = episode_calls(model)
    turns, chains = per_request(calls), prefix_merging(calls).rows
    assert (len(turns), len(chains)) == (3, 1)
    stamped = [
        [msgspec.structs.replace(row, advantages=(-0.7,) * len(row.token_ids), token_weight=0.2) for row in rows]
        for rows in (turns, chains)
    ]
    assert algorithm.normaliser(stamped[0]) == pytest.approx(algorithm.normaliser(stamped[1]))
    found, expected = (gradient_of(folder, rows, algorithm, micro_tokens=1) for rows in stamped)
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("algorithm", NARROW, ids=lambda each: type(each).__name__)
def test_context_has_exactly_no_gradient(model: PreTrainedModel, algorithm: PolicyGradient) -> None:
    rows = sampled_rows(model)
    changed = (hidden_gradients(model, rows, algorithm) != 0.0).any(-1)
    predicting = predicting_positions(rows)
    assert not changed[~predicting].any()
    if not isinstance(algorithm, DoubleSided):
        assert changed[predicting].all()


def test_beyond_the_window_a_token_is_silent_if_masked_and_heard_if_clamped(model: PreTrainedModel) -> None:
    rows = sampled_rows(model)
    batch = collate(rows)
    assert batch.rollout_logprobs is not None
    with torch.no_grad():
        ratios = (compute_logprobs(model, batch) - batch.rollout_logprobs).exp()
    outside = (ratios <= 0.5) | (ratios >= 1.5)
    assert 0.2 < outside.float().mean() < 0.8
    places = batch.row, batch.column
    silent, heard = (
        (hidden_gradients(model, rows, kind)[places] == 0.0).all(-1)
        for kind in (DoubleSided(0.5, 1.5), Cispo(0.5, 1.5))
    )
    assert torch.equal(silent, outside)
    assert not heard.any()


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
    batch = collate(rows)
    assert batch.token_weights.tolist() == [0.25, 0.25, 2.0]
    losses = Reinforce().token_losses(torch.tensor([-1.0, -2.0, -3.0]), batch)
    assert losses.tolist() == [0.25, 0.5, 6.0]


def test_rows_without_recorded_log_probabilities_are_refused_by_those_that_need_them() -> None:
    batch = collate([TrainRow((1, 2), (0, 1))])
    for algorithm in (Cispo(), DoubleSided(), Interaction()):
        with pytest.raises(UsageError, match="rollout_logprobs"):
            algorithm.token_losses(torch.tensor([-1.0]), batch)
    assert Reinforce().token_losses(torch.tensor([-1.0]), batch).tolist() == [1.0]


def test_algorithms_have_their_bounds_from_the_settings() -> None:
    rl = Rl(ratio=(0.25, 3.0))
    assert make_algorithm("cispo", rl) == Cispo(0.25, 3.0)
    assert make_algorithm("double_sided", rl) == DoubleSided(0.25, 3.0)
    assert make_algorithm("interaction", rl) == Interaction(0.25, 3.0)
    assert make_algorithm("reinforce", rl) == Reinforce()
    assert make_algorithm("cispo") == Cispo(0.0, 5.0)
