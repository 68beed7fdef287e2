"""Merging adds adapters to the weights of their base in float32, and says what rounding loses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness1.config import Lora
from harness1.errors import UsageError
from harness1.models.adapters import add_adapters
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from harness1.runs.files import write_json
from harness1.training.trainable import merge, rounding_loss
from tests.cli.commands import Command, command_in_process
from tests.models.test_adapters import EXPERTS, KINDS_OF_MIXTURES, PLAIN, logits_of, save_adapters, stir
from tests.tiny_models import save_tiny_model


@pytest.mark.parametrize(("kind", "lora"), [("llama", PLAIN), ("gpt_oss", EXPERTS)])
def test_the_merged_model_is_a_plain_one_that_computes_the_same(tmp_path: Path, kind: str, lora: Lora) -> None:
    base = save_tiny_model(tmp_path / "base", kind, **KINDS_OF_MIXTURES.get(kind, {}))
    model = save_adapters(tmp_path / "adapters", base, lora)
    lost = merge(tmp_path / "adapters", tmp_path / "merged", "float32")
    assert lost.total < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(plain), logits_of(model), rtol=0, atol=1e-4)


def test_rounding_loses_more_of_smaller_updates(tmp_path: Path) -> None:
    model = load_causal_model(save_tiny_model(tmp_path), "cpu", "bfloat16")
    add_adapters(model, PLAIN, seed=0)
    stir(model)
    lost = []
    for factor in (1.0, 1e-2, 1e-6):
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.mul_(factor)
        lost.append(rounding_loss(model, "bfloat16"))
    assert lost[0].total < 0.1 < lost[1].total < lost[2].total
    assert lost[2].total == pytest.approx(1.0, abs=0.1), "all of it"
    assert all(each.total <= each.largest for each in lost)
    assert lost[0].layer.endswith("proj.weight")


def test_the_card_goes_along_and_speaks_of_no_base(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    save_adapters(tmp_path / "adapters", base)
    card = Checkpoint(format="f", counter="c", env={}, env_hash="e", base="b", step=7)
    write_json(tmp_path / "adapters" / CHECKPOINT, card)
    merge(tmp_path / "adapters", tmp_path / "merged", "bfloat16")
    assert read_checkpoint(tmp_path / "merged") == card
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16


def test_what_holds_no_adapters_or_would_be_overwritten_is_refused(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    with pytest.raises(UsageError, match="no adapters"):
        merge(base, tmp_path / "merged", "bfloat16")
    save_adapters(tmp_path / "adapters", base)
    with pytest.raises(UsageError, match="not empty"):
        merge(tmp_path / "adapters", base, "bfloat16")


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def test_the_verb_prints_what_was_lost(tmp_path: Path, harness1: Command) -> None:
    save_adapters(tmp_path / "adapters", save_tiny_model(tmp_path / "base"))
    places = [str(tmp_path / "adapters"), "--out", str(tmp_path / "merged")]
    found = json.loads(harness1("models", "merge", *places, "--json").out)
    assert found["dtype"] == "bfloat16"
    assert 0 < found["total"] <= found["largest"]
