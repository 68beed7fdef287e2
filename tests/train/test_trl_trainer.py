from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trl.trainer.base_trainer
from transformers import AutoModelForCausalLM

from harness1.config import Lora, Train, Validation
from harness1.errors import MissingExtra, UsageError
from harness1.model_folder import holds_adapters
from harness1.models.adapters import merge_adapters, read_adapters
from harness1.models.causal_model import load_causal_model
from harness1.rows import TrainRow
from harness1.training.trainable import load_trainable
from harness1.training.trainer import rate_at
from harness1.training.trl_trainer import passes_of, train_with_trl
from tests.tiny_models import STOP, save_byte_tokenizer, save_tiny_model
from tests.train import test_trainer
from tests.train.test_trainer import plain_logprobs

Log = list[dict[str, float]]

TWO_BY_TWO = 50  # tokens of a pass that holds two rows, so that a step of four has two passes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(save_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1))


made_rows = partial(test_trainer.made_rows, (24, 5, 17, 9))


def plain_settings(**changes: object) -> Train:
    steps = {"epochs": 1, "batch_rows": 4, "micro_tokens": TWO_BY_TWO, "save_every": 0, "watch": Validation(every=0)}
    return Train(**{"rate": 1e-2, "lora": Lora(rank=0), "dtype": "float32", **steps, **changes})


def trained(
    folder: Path,
    out: Path,
    settings: Train,
    rows: Sequence[TrainRow],
    held_out: Sequence[TrainRow] = (),
    packing: bool = False,
) -> Log:
    log: Log = []
    assert train_with_trl(rows, held_out, folder, out, settings, log.append, packing=packing, cpu=True) == out
    return log


def loaded(folder: Path) -> torch.nn.Module:
    """Adapters are merged, so that weights can be compared."""
    model = load_causal_model(folder, "cpu", "float32")
    if holds_adapters(folder):
        merge_adapters(model)
    return model


def mean_loss(model: Any, rows: Sequence[TrainRow]) -> torch.Tensor:
    return -torch.cat([plain_logprobs(model, row) for row in rows]).mean()


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_plain_adamws(folder: Path, tmp_path: Path, packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With packing, all rows stand in two sequences: that the loss is their mean shows that none sees another."""
    monkeypatch.setattr("harness1.training.trl_trainer.EPSILON", 1e-3)  # less makes much of rounding
    rows, model = made_rows(), loaded(folder)
    log = trained(folder, tmp_path, plain_settings(schedule="constant"), rows, packing=packing)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, (0.9, 0.95), 1e-3, weight_decay=0.0)
    loss = mean_loss(model, rows)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert norm > 1.0
    assert [line["step"] for line in log if "loss" in line] == [1]
    assert log[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert log[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    torch.testing.assert_close(loaded(tmp_path).state_dict(), model.state_dict(), rtol=0, atol=1e-5)


def test_adapters_are_saved_beside_their_base_and_nothing_is_sent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[object] = []
    monkeypatch.delenv("CI", raising=False)  # TRL is silent there anyway
    monkeypatch.setattr(trl.trainer.base_trainer, "send_telemetry", lambda *_, **named: reached.append(named))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **_: reached.append(given))
    watch = Validation(every=1, rows=2)
    settings = plain_settings(lora=Lora(rank=4, alpha=8.0), save_every=1, checkpointing=True, watch=watch)
    log = trained(folder, tmp_path, settings, made_rows(), made_rows(seed=1))
    before, after = loaded(folder).state_dict(), loaded(tmp_path).state_dict()
    assert (reached, before.keys()) == ([], after.keys())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    means = [mean_loss(loaded(tmp_path), [row]).item() for row in made_rows(seed=1)[:2]]
    (looked,) = (line["eval_loss"] for line in log if "eval_loss" in line)
    assert looked == pytest.approx(sum(means) / 2, abs=1e-5)
    exchanged = {path.name for path in tmp_path.iterdir()} ^ {path.name for path in folder.iterdir()}
    assert exchanged == {"model.safetensors", "adapter_model.safetensors", "adapter_config.json"}
    for path in folder.glob("*.json"):
        assert (tmp_path / path.name).read_text() == path.read_text()


def test_adapters_of_a_checkpoint_are_trained_further_in_float32(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    settings = plain_settings(lora=Lora(rank=4, alpha=8.0), dtype="bfloat16")
    trained(folder, first, settings, made_rows())
    trained(first, second, msgspec.structs.replace(settings, rate=1e-30), made_rows())
    before, after = read_adapters(first), read_adapters(second)
    assert (after.rank, after.alpha) == (4, 8.0)
    assert before.tensors.keys() == after.tensors.keys()
    torch.testing.assert_close(after.tensors, before.tensors, rtol=0, atol=1e-20)
    assert any(value.bfloat16().float().ne(value).any() for value in after.tensors.values())
    with pytest.raises(UsageError, match=r"train\.lora\.rank=4"):
        trained(first, tmp_path / "third", plain_settings(lora=Lora(rank=2)), made_rows())


@pytest.mark.parametrize("tied", [False, True])
def test_in_bfloat16_weights_and_logits_stay_float32(tmp_path: Path, tied: bool) -> None:
    """Of a single token, where no mean hides what is rounded, the loss is that of our model to the digit."""
    special = {"eos_token_id": [STOP, 7], "pad_token_id": None}
    folder = save_byte_tokenizer(save_tiny_model(tmp_path / "model", tie_word_embeddings=tied, **special))
    row = made_rows()[0]
    row = TrainRow(token_ids=row.token_ids, loss_mask=(0,) * (len(row.token_ids) - 1) + (1,))
    settings = plain_settings(dtype="bfloat16", batch_rows=1)
    log = trained(folder, tmp_path / "out", settings, [row])
    with torch.autocast("cpu", torch.bfloat16):
        expected = mean_loss(load_trainable(folder, settings, "cpu"), [row]).item()
    exact = mean_loss(loaded(folder), [row]).item()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert log[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(exact, abs=1e-5)
    assert {parameter.dtype for parameter in after.parameters()} == {torch.float32}
    assert mean_loss(after, [row]).item() < exact
    assert (tmp_path / "out" / "config.json").read_text() == (folder / "config.json").read_text()


def test_an_interrupted_training_goes_on_as_if_it_had_not_been_by_our_schedule(folder: Path, tmp_path: Path) -> None:
    changes = {"epochs": 2, "batch_rows": 2, "save_every": 2, "lora": Lora(rank=4), "warmup": 0.5, "schedule": "cosine"}
    settings = plain_settings(**changes)
    rows = test_trainer.made_rows((9, 8, 7, 6, 5))

    def interrupt(numbers: dict[str, float]) -> None:
        if numbers["step"] == 4:
            raise KeyboardInterrupt

    log = trained(folder, tmp_path / "whole", settings, rows)
    rates = [line["learning_rate"] for line in log if "learning_rate" in line]
    assert rates == pytest.approx([rate_at(step, 6, settings) for step in range(6)])
    with pytest.raises(KeyboardInterrupt):
        train_with_trl(rows, (), folder, tmp_path / "parts", settings, interrupt, cpu=True)
    log = trained(folder, tmp_path / "parts", settings, rows)
    assert [line["step"] for line in log if "loss" in line] == [3, 4, 5, 6]
    parts, whole = loaded(tmp_path / "parts").state_dict(), loaded(tmp_path / "whole").state_dict()
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


def test_packing_keeps_every_token_and_the_mean_size_of_a_step(folder: Path, tmp_path: Path) -> None:
    """Rows are cut nowhere, even one longer than the budget of a pass."""
    lengths = (30, 10, 10, 10, 10, 10, 10, 10)
    log = trained(folder, tmp_path, plain_settings(micro_tokens=20), test_trainer.made_rows(lengths), packing=True)
    steps = [line for line in log if "loss" in line]
    assert (steps[-1]["num_tokens"], len(steps)) == (sum(lengths), 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((128, 1000, 32768, 1), (32, 4)),
        ((128, 1000, 32768, 4), (32, 1)),
        ((6, 10, 50, 1), (3, 2)),
        ((7, 10, 50, 1), (1, 7)),
        ((4, 10, 5, 2), (1, 2)),
    ],
)
def test_a_step_has_equal_passes_within_the_budget(given: tuple[int, int, int, int], expected: tuple[int, int]) -> None:
    assert passes_of(*given) == expected
    with pytest.raises(UsageError, match="equally by 3"):
        passes_of(4, 10, 50, 3)


def weighted(rows: list[TrainRow]) -> list[TrainRow]:
    return [msgspec.structs.replace(row, advantages=tuple(0.5 * mask for mask in row.loss_mask)) for row in rows]


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (lambda rows: [], plain_settings(), "no rows"),
        (weighted, plain_settings(), "some rows have token weights: .* --trainer trl"),
        (list, plain_settings(watch=Validation(metric="valid")), r"watch\.metric needs our own trainer"),
        (list, plain_settings(lora=Lora(rank=2, experts=True)), r"train\.lora\.experts needs our own trainer"),
        (list, plain_settings(lora=Lora(rank=2, layers=1)), r"train\.lora\.layers needs our own trainer"),
        (list, plain_settings(attention="flash_attention_2"), "flash_attention_2 needs our own trainer"),
    ],
)
def test_what_trl_cannot_do_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[list[TrainRow]], list[TrainRow]], settings: Train, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        trained(folder, tmp_path / "out", settings, change(made_rows()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["trl", "datasets", "peft", "accelerate"])
def test_what_is_missing_is_named(folder: Path, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{package} is not installed; .*\[trl\]"):
        trained(folder, tmp_path, plain_settings(), made_rows())
