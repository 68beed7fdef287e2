"""`harness1 train plan`, and the refusal of training that cannot fit."""

import json
from pathlib import Path

import pytest

from harness1.cli import training
from tests.cli.commands import Command
from tests.cli.test_rl_train import home, train
from tests.tiny_models import save_tiny_model

__all__ = ["home"]


def test_a_plan_of_a_folder_is_one_object(harness1: Command, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    ended = harness1("train", "plan", "--model", str(tmp_path / "model"), "--sampling", "none", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["fits"], found["advice"]) == (True, None)
    assert found["plan"]["batch"] == [1, 32768, 2048]
    assert found["needs"] == sum(found["plan"]["held"].values()) + max(found["plan"]["moments"].values())


def test_a_plan_that_does_not_fit_names_settings_that_do(harness1: Command, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    plan = ["train", "plan", "--model", str(tmp_path / "model" / "config.json"), "--gpu", "0.06", "--context", "8192"]
    ended = harness1(*plan, "--set", "train.dtype=float32", "--sampling", "none")
    assert ended.code == 0, ended.err
    assert "It does not fit" in ended.out
    fitting = ["--set", "train.checkpointing=true", "--set", "train.micro_tokens=8192"]
    assert f"GB with: {' '.join(fitting)}." in ended.out
    ended = harness1(*plan, "--set", "train.dtype=float32", "--sampling", "none", *fitting)
    assert ended.out.endswith("It fits.\n"), ended.out


def test_half_of_several_gpus_sample(harness1: Command, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    plan = ["train", "plan", "--model", str(tmp_path / "model"), "--context", "4096"]
    ended = harness1(*plan, "--count", "8", "--json")
    devices = json.loads(ended.out)["plan"]["devices"]
    assert (devices["trainers"], devices["samplers"], devices["sampling"]) == (4, 4, "apart")
    assert "room for keys and values" in harness1(*plan, "--count", "2").out
    assert harness1(*plan, "--sampling", "apart").code == 2


def test_training_that_cannot_fit_is_refused_before_a_model_is_loaded(
    harness1: Command, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr(training, "device_memory", lambda device: 10**5)
    ended = harness1(*train(out="refused"))
    assert (ended.code, "machine.check_memory=false" in ended.err) == (2, True)
    assert not (home / "refused").exists()
    ended = harness1(*train("--set", "machine.check_memory=false", data="nowhere"))
    assert "nowhere" in ended.err  # it went on
    assert "memory: at most" in ended.err
    assert "weights of the sampler" in ended.err
