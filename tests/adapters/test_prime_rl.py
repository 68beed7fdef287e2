"""prime-rl trains with the loss of our own trainer, and by the settings of the published recipe.

Its contract (`LossInputs` and `LossOutputs` of `prime_rl/trainer/rl/loss.py`, August 2026) is restated here.
"""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import harness1
from harness1.adapters.prime_rl import cispo_loss
from harness1.config import load_config
from harness1.rows import TrainRow
from harness1.training.algorithm import Cispo
from harness1.training.trainer import BETAS, CLIP, DECAY, collate

RECIPE = Path(harness1.__file__).parent / "adapters" / "recipes" / "prime_rl_gpt_oss_20b.toml"


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


def sequence(seed: int, weighted: bool = False, length: int = 50) -> LossInputs:
    noise = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(length, generator=noise) - 0.1
    moved = rollout + 1.5 * torch.randn(length, generator=noise)
    return LossInputs(
        moved.requires_grad_(),
        rollout,
        None,
        torch.randn(length, generator=noise),
        torch.rand(length, generator=noise) < 0.7,
        torch.rand(length, generator=noise) if weighted else None,
    )


def losses_of_our_trainer(inputs: LossInputs, logprobs: Tensor, algorithm: Cispo) -> Tensor:
    """The same sequence as a row behind one token of context."""
    mask = (0, *map(int, inputs.loss_mask.tolist()))
    known = (0.0, *(inputs.inference_logprobs * inputs.loss_mask).tolist())
    row = TrainRow(tuple(range(len(mask))), mask, known, (0.0, *inputs.advantages.tolist()))
    return algorithm.token_losses(logprobs[inputs.loss_mask], collate([row]))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bounds", [(0.0, 5.0), (0.5, 1.5)])
def test_loss_and_gradient_are_those_of_our_own_trainer(seed: int, bounds: tuple[float, float]) -> None:
    inputs = sequence(seed)
    found = cispo_loss(inputs, *bounds)
    expected = losses_of_our_trainer(inputs, inputs.trainer_logprobs, Cispo(*bounds)).sum()
    torch.testing.assert_close(found.loss, expected)
    ours, theirs = (torch.autograd.grad(each, inputs.trainer_logprobs)[0] for each in (expected, found.loss))
    torch.testing.assert_close(theirs, ours)
    assert not theirs[~inputs.loss_mask].any()
    assert theirs[inputs.loss_mask].all()


def test_a_step_of_several_sequences_is_our_token_mean() -> None:
    """prime-rl adds the losses of all sequences and divides by the tokens that they train."""
    step = [sequence(seed, length=Random(seed).randint(3, 60)) for seed in range(6)]
    total = sum(cispo_loss(each).loss for each in step) / sum(int(each.loss_mask.sum()) for each in step)
    rows = [
        TrainRow(
            tuple(range(len(each.loss_mask) + 1)),
            (0, *map(int, each.loss_mask.tolist())),
            (0.0, *(each.inference_logprobs * each.loss_mask).tolist()),
            (0.0, *each.advantages.tolist()),
        )
        for each in step
    ]
    algorithm = Cispo()
    losses = [losses_of_our_trainer(each, each.trainer_logprobs, algorithm).sum() for each in step]
    torch.testing.assert_close(total, sum(losses) / algorithm.normaliser(rows))


def test_weights_of_tokens_scale_their_losses() -> None:
    inputs = sequence(3, weighted=True)
    (found,) = torch.autograd.grad(cispo_loss(inputs).loss, inputs.trainer_logprobs)
    weights, inputs.loss_weights = inputs.loss_weights, None
    (plain,) = torch.autograd.grad(cispo_loss(inputs).loss, inputs.trainer_logprobs)
    assert weights is not None
    torch.testing.assert_close(found, plain * weights)


def test_metrics_are_scalars_of_the_trained_tokens_and_carry_no_gradient() -> None:
    inputs = sequence(1)
    metrics = cispo_loss(inputs, 0.5, 1.5).metrics
    ratios = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs)[inputs.loss_mask].exp()
    assert all(each.dim() == 0 and not each.requires_grad for each in metrics.values())
    assert float(metrics["cispo/ratio_max"]) == pytest.approx(float(ratios.max()))
    assert float(metrics["cispo/clipped"]) == pytest.approx(float(((ratios < 0.5) | (ratios > 1.5)).float().mean()))
    assert float(metrics["cispo/k3"]) == pytest.approx(float((ratios - 1 - ratios.log()).mean()), rel=1e-4)


def test_a_sequence_without_trained_tokens_has_a_loss_of_zero_to_go_back_from() -> None:
    inputs = sequence(2)
    inputs.loss_mask = torch.zeros(50, dtype=torch.bool)
    found = cispo_loss(inputs)
    found.loss.backward()
    assert found.loss.item() == 0.0
    assert not inputs.trainer_logprobs.grad.any()
    assert all(bool(torch.isfinite(each)) for each in found.metrics.values())


def test_a_token_that_was_all_but_impossible_has_a_finite_loss() -> None:
    inputs = sequence(4)
    inputs.inference_logprobs = inputs.inference_logprobs - 1e4
    assert bool(torch.isfinite(cispo_loss(inputs, ratio_max=float("inf")).loss))


def test_the_recipe_has_the_settings_of_our_own_recipe() -> None:
    recipe: dict[str, Any] = tomllib.loads(RECIPE.read_text())
    config = load_config("rl/paper")
    trainer, orchestrator = recipe["trainer"], recipe["orchestrator"]
    module, _, name = trainer["loss"]["import_path"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is cispo_loss
    assert trainer["loss"]["kwargs"] == dict(zip(("ratio_min", "ratio_max"), config.rl.ratio, strict=True))
    assert recipe["seq_len"] == config.env.context_window == recipe["inference"]["vllm"]["max_model_len"]
    assert orchestrator["group_size"] == config.rl.samples
    assert orchestrator["batch_size"] * config.rl.substeps == config.rl.groups * config.rl.samples
    assert recipe["max_steps"] == config.rl.batches * config.rl.substeps
    optimizer = trainer["optim"]
    assert (optimizer["lr"], optimizer["betas1"], optimizer["betas2"]) == (1e-5, *BETAS)
    assert (optimizer["weight_decay"], optimizer["max_norm"]) == (DECAY, CLIP)
    adapters = trainer["model"]["lora"]
    assert (adapters["rank"], adapters["alpha"]) == (config.train.lora.rank, config.train.lora.alpha)
    assert "experts" in adapters["target_modules"]
    assert orchestrator["train"]["sampling"]["temperature"] == config.policy.temperature == 1.0
    assert orchestrator["train"]["sampling"]["max_completion_tokens"] == config.env.generation_reserve
    assert recipe["inference"]["vllm"]["max_lora_rank"] >= adapters["rank"]
