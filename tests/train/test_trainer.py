"""An optimizer step is that of plain AdamW on the mean over all trained tokens, however rows are cut and resumed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness1.config import Lora, Train
from harness1.errors import UsageError
from harness1.models.causal_model import load_causal_model
from harness1.rows import TrainRow
from harness1.training.algorithm import MicroBatch, NegativeLogLikelihood
from harness1.training.trainable import load_trainable
from harness1.training.trainer import (
    CLIP,
    Diverged,
    Trainer,
    by_token_budget,
    collate,
    compute_logprobs,
    rate_at,
    shuffle_steps,
)
from tests.tiny_models import VOCABULARY, save_tiny_model

LENGTHS = (24, 5, 17, 9, 17)


def made_rows(lengths: Sequence[int] = LENGTHS, seed: int = 0, **fields: object) -> list[TrainRow]:
    """Random rows, trained in several stretches of very different lengths."""
    random = Random(seed)
    return [
        TrainRow(
            token_ids=tuple(random.randrange(VOCABULARY) for _ in range(length)),
            loss_mask=tuple(int(place >= 3 and place % 7 != 0) for place in range(length)),
            **fields,
        )
        for length in lengths
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_causal_model(save_tiny_model(tmp_path_factory.mktemp("model")), "cpu", "float32")


def plain_logprobs(model: PreTrainedModel, row: TrainRow) -> Tensor:
    """One row by itself, without padding."""
    ids = torch.tensor(row.token_ids)
    logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    of_tokens: Tensor = logprobs[torch.arange(len(ids) - 1), ids[1:]]
    return of_tokens[torch.tensor(row.loss_mask[1:], dtype=torch.bool)]


def test_logits_are_computed_for_each_trained_token_and_nowhere_else(model: PreTrainedModel) -> None:
    rows = [TrainRow((5, 6, 7, 8, 9), (0, 0, 1, 0, 1)), TrainRow((5, 6, 7), (0, 1, 1))]
    shapes: list[torch.Size] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, given, out: shapes.append(out.shape))
    with torch.no_grad():
        compute_logprobs(model, collate(rows))
        assert model(input_ids=torch.tensor([[5, 6]])).logits.shape[:2] == (1, 2)
    hook.remove()
    assert [shape[:2] for shape in shapes] == [(1, 4), (1, 2)]


def test_what_a_model_does_to_its_logits_is_kept(tmp_path: Path) -> None:
    """Caps (Gemma 2) and scales (Granite) are applied behind the head."""
    for kind, settings in (("gemma2", {"final_logit_softcapping": 0.5}), ("granite", {"logits_scaling": 4.0})):
        changed = load_causal_model(save_tiny_model(tmp_path / kind, kind, **settings), "cpu", "float32")
        rows = made_rows()
        with torch.no_grad():
            found = compute_logprobs(changed, collate(rows))[0]
            expected = torch.cat([plain_logprobs(changed, row) for row in rows])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_micro_batch_lists_the_trained_tokens_of_its_rows_in_order() -> None:
    rows = [
        TrainRow((5, 6, 7, 8), (0, 1, 0, 1), rollout_logprobs=(0.0, -0.5, 0.0, -2.0), advantages=(0.0, 0.5, 9.0, 2.0)),
        TrainRow((9, 4), (0, 1), rollout_logprobs=(0.0, -1.0)),
    ]
    batch = collate(rows)
    assert (batch.ids.tolist(), batch.row.tolist()) == ([[5, 6, 7, 8], [9, 4, 0, 0]], [0, 0, 1])
    assert (batch.column.tolist(), batch.targets.tolist()) == ([0, 2, 0], [6, 8, 4])
    assert (batch.weights.tolist(), batch.rollout_logprobs.tolist()) == ([0.5, 2.0, 1.0], [-0.5, -2.0, -1.0])
    assert batch.weights.dtype == batch.rollout_logprobs.dtype == torch.float32


@pytest.mark.parametrize("mask", [(0, 0, 0), (1, 0, 1)], ids=["nothing", "the first token"])
def test_what_cannot_be_trained_is_refused(mask: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="trained tokens"):
        collate([TrainRow((1, 2, 3), mask)])


Lengths = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@given(Lengths, st.integers(1, 200), st.randoms(use_true_random=False))
def test_each_row_is_in_one_pass_within_budget_in_any_order(lengths: list[int], budget: int, random: Random) -> None:
    assert by_token_budget([4, 10, 5, 30, 4], 20) == [[3], [1, 2], [0, 4]]  # filled before the next begins
    groups = by_token_budget(lengths, budget)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[place] for place in group) * len(group)
        assert padded <= budget or len(group) == 1
    other = random.sample(lengths, len(lengths))
    again = [[other[place] for place in group] for group in by_token_budget(other, budget)]
    assert again == [[lengths[place] for place in group] for group in groups]


def test_every_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    steps = list(shuffle_steps(10, 4, 3, seed=5))
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    epochs = [[place for step in steps[at : at + 3] for place in step] for at in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(shuffle_steps(10, 4, 4, seed=5))[:9] == steps != list(shuffle_steps(10, 4, 3, seed=6))


ADAPTERS = Lora(rank=4, alpha=8.0)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), attention_dropout=0.5, **SMALL)


def plain_train(**changes: Any) -> Train:
    """Whole weights in float32."""
    settings = {"rate": 1e-2, "lora": Lora(rank=0), "dtype": "float32", "schedule": "constant"}
    return Train(**{**settings, **changes})


def make_trainer(folder: Path, train: Train, steps: int = 10, algorithm: Any = None) -> Trainer:
    return Trainer(load_trainable(folder, train, "cpu"), algorithm or NegativeLogLikelihood(), train, steps)


def gradient(trainer: Trainer, rows: Sequence[TrainRow]) -> Tensor:
    """The gradient that a step hands to the optimizer, as one line."""
    found: list[Tensor] = []

    def note(*_: object) -> None:
        found.append(torch.cat([parameter.grad.flatten() for parameter in trainer.parameters]))

    hook = trainer.optimizer.register_step_pre_hook(note)
    trainer.step(rows)
    hook.remove()
    return found[0]


def gradient_of(folder: Path, rows: Sequence[TrainRow], algorithm: Any = None, **changes: Any) -> Tensor:
    return gradient(make_trainer(folder, plain_train(**changes), algorithm=algorithm), rows)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, of two gradients."""
    assert expected.norm() > 0
    return float((found - expected).double().norm() / expected.double().norm())


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.parameters]


def mean_loss(model: Any, rows: Sequence[TrainRow]) -> Tensor:
    return -torch.cat([plain_logprobs(model, row) for row in rows]).mean()


def test_steps_are_plain_adamws_on_the_mean_over_trained_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.training.trainer.CLIP", CLIP)  # as shipped
    train = plain_train(schedule="linear", warmup=0.5, micro_tokens=50)
    trainer, model = make_trainer(folder, train, steps=4), AutoModelForCausalLM.from_pretrained(folder).eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1.0, (0.9, 0.95), 1e-8, weight_decay=0.0)
    for step in range(4):
        rows = made_rows(seed=step)
        loss = mean_loss(model, rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate_at(step, 4, train)
        optimizer.step()
        optimizer.zero_grad()
        assert norm > 1.0
        expected = {"loss": loss.item(), "gradient": norm.item(), "rate": (5e-3, 1e-2, 1e-2, 5e-3)[step]}
        expected["trained_tokens"] = sum(sum(row.loss_mask) for row in rows)
        assert trainer.step(rows) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict(), rtol=0, atol=1e-5)


def test_rows_without_any_weight_have_no_gradient(folder: Path) -> None:
    trainer = make_trainer(folder, plain_train())
    before = weights_of(trainer)
    rows = [msgspec.structs.replace(row, advantages=(0.0,) * len(row.token_ids)) for row in made_rows()]
    assert trainer.step(rows)["loss"] == trainer.loss(rows) == 0.0
    assert all(map(torch.equal, weights_of(trainer), before))


def test_the_loss_of_rows_is_looked_at_without_a_change(folder: Path) -> None:
    trainer, rows = make_trainer(folder, plain_train(micro_tokens=50)), made_rows()
    before = weights_of(trainer)
    looked = trainer.loss(rows)
    assert all(map(torch.equal, weights_of(trainer), before))
    assert all(parameter.grad is None for parameter in trainer.parameters)
    assert trainer.step(rows)["loss"] == pytest.approx(looked, rel=1e-6)
    assert trainer.loss(rows) < looked


@pytest.mark.parametrize(("lora", "dtype"), [(Lora(rank=0), "bfloat16"), (ADAPTERS, "float32")])
def test_a_resumed_training_goes_on_as_if_uninterrupted(folder: Path, tmp_path: Path, lora: Lora, dtype: str) -> None:
    train = plain_train(lora=lora, dtype=dtype, schedule="cosine", warmup=0.3)
    rows = made_rows((12,) * 6)
    steps = [[rows[place] for place in places] for places in shuffle_steps(6, 2, 2, seed=1)]
    whole = make_trainer(folder, train, len(steps))
    begun = make_trainer(folder, train, len(steps))
    expected = [whole.step(each) for each in steps]
    for each in steps[:3]:
        begun.step(each)
    name = begun.save(tmp_path)
    resumed = make_trainer(folder, train, len(steps))
    resumed.load(tmp_path, name)
    assert (resumed.step_count, [resumed.step(each) for each in steps[3:]]) == (3, expected[3:])
    assert all(map(torch.equal, weights_of(resumed), weights_of(whole)))


class Exploding(NegativeLogLikelihood):
    """The loss, or its gradient alone, is no number."""

    def __init__(self, loss: bool) -> None:
        object.__setattr__(self, "loss", loss)

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        if self.loss:
            return logprobs * torch.inf
        return (logprobs - logprobs.detach()).abs().sqrt()


@pytest.mark.parametrize("loss", [True, False], ids=["loss", "gradient"])
def test_a_step_that_diverges_changes_nothing(folder: Path, loss: bool) -> None:
    trainer, twin = (make_trainer(folder, plain_train()) for _ in range(2))
    before, state = weights_of(trainer), copy.deepcopy(trainer.optimizer.state_dict())
    trainer.algorithm = Exploding(loss)
    with pytest.raises(Diverged, match=r"diverged at step 1 .*train\.rate"):
        trainer.step(made_rows())
    assert all(map(torch.equal, weights_of(trainer), before))
    assert (trainer.optimizer.state_dict(), trainer.step_count) == (state, 0)
    trainer.algorithm = NegativeLogLikelihood()
    assert trainer.step(made_rows()) == twin.step(made_rows())
    assert all(map(torch.equal, weights_of(trainer), weights_of(twin)))


class Greedy(NegativeLogLikelihood):
    """Wants more memory than there is."""

    def token_losses(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_micro_batch_that_does_not_fit_names_the_settings_that_make_it_smaller(folder: Path) -> None:
    trainer = make_trainer(folder, plain_train(micro_tokens=64), algorithm=Greedy())
    with pytest.raises(UsageError, match=r"64 tokens .* lower train\.micro_tokens, or turn on train\.checkpointing"):
        trainer.step(made_rows())


@pytest.mark.parametrize("lora", [Lora(rank=0), ADAPTERS], ids=["whole", "adapters"])
def test_in_bfloat16_layers_are_rounded_and_neither_logits_nor_trained_weights(folder: Path, lora: Lora) -> None:
    trainer, plain = (make_trainer(folder, plain_train(lora=lora, dtype=dtype)) for dtype in ("bfloat16", "float32"))
    logits: list[Tensor] = []
    hidden: list[torch.dtype] = []
    model: Any = trainer.model
    model.register_forward_hook(lambda _, __, made: logits.append(made.logits.detach()))
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, made: hidden.append(made.dtype))
    found, expected = trainer.step(made_rows()), plain.step(made_rows())
    assert logits[0].dtype == torch.float32
    assert (logits[0] != logits[0].bfloat16().float()).float().mean() > 0.9
    assert hidden == [torch.bfloat16]
    assert {parameter.dtype for parameter in trainer.parameters} == {torch.float32}
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-2)
    assert found["loss"] != expected["loss"]


@pytest.mark.parametrize("lora", [Lora(rank=0), ADAPTERS], ids=["whole", "adapters"])
def test_checkpointing_computes_layers_twice_and_the_same_gradient(folder: Path, lora: Lora) -> None:
    """The model's dropout, were it on, would show in both."""
    calls: list[int] = []
    found: list[Tensor] = []
    for checkpointing in (False, True):
        trainer = make_trainer(folder, plain_train(lora=lora, checkpointing=checkpointing))
        passed: list[object] = []
        layer: Any = trainer.model.model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, passed=passed: passed.append(_))
        found.append(gradient(trainer, made_rows()))
        calls.append(len(passed))
    assert calls == [1, 2]
    assert distance(found[1], found[0]) < 1e-6


def test_only_adapters_are_trained_and_saved_where_there_are_some(folder: Path) -> None:
    trainer = make_trainer(folder, plain_train(lora=ADAPTERS))
    adapters = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for seed in range(2):  # B is 0 before the first step, and so is the gradient of A
        trainer.step(made_rows(seed=seed))
    changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(adapters)
    assert all("lora_" in name for name in adapters)
    assert len(trainer.parameters) == len(adapters) == 2 * 7


@pytest.mark.parametrize("micro_tokens", [1, 30, 10_000])
def test_log_probabilities_are_those_of_each_row_in_the_order_given(folder: Path, micro_tokens: int) -> None:
    trainer, rows = make_trainer(folder, plain_train(micro_tokens=micro_tokens)), made_rows()
    found = trainer.logprobs(rows)
    assert all(parameter.grad is None for parameter in trainer.parameters)
    for row, logprobs in zip(rows, found, strict=True):
        with torch.no_grad():
            assert logprobs == pytest.approx(plain_logprobs(trainer.model, row).tolist(), abs=1e-5)


def rates(steps: int, schedule: str, warmup: float = 0.0) -> list[float]:
    """The rates of all steps, and of the one that would follow."""
    train = Train(rate=2.0, schedule=schedule, warmup=warmup)
    return [rate_at(step, steps, train) for step in range(steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.5, 1.0, 0.5, 0.0]),
        ("cosine", [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0]),
    ],
)
def test_behind_a_linear_rise_the_rate_falls_from_its_full_value(schedule: str, expected: list[float]) -> None:
    assert rates(4, schedule) == pytest.approx(expected)
    assert rates(8, schedule, warmup=0.5) == pytest.approx([0.5, 1.0, 1.5, 2.0, *expected])
    assert rates(4, schedule, warmup=1.0)[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
