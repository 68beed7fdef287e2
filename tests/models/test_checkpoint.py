"""The card of a trained model: what it demands of the environment that it is run in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from harness1.config import Config, load_config
from harness1.config.settings import differences
from harness1.env.environment import env_hash
from harness1.errors import ConfigError
from harness1.model_folder import folder_hash
from harness1.models.checkpoint import CHECKPOINT, Checkpoint, environment_of, format_of, read_checkpoint
from harness1.models.open import format_at
from harness1.policy.registry import open_model
from harness1.training.saving import write_card
from tests.tiny_models import save_tiny_model
from tests.vocabularies import vocabulary

LEARNED = ["env.max_turns=6", "env.search.hits=3", "env.grep.on=false"]


def learned(*more: str) -> Config:
    """The configuration of the training, with further settings."""
    return load_config(None, [*LEARNED, *more])


def card(**changes: Any) -> Checkpoint:
    env = learned().env
    known = {"format": "compact", "counter": "c", "env": env.plain(), "env_hash": env_hash(env)}
    return Checkpoint(**{**known, "base": "b", **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What was trained in compact, with a tokenizer for which the format would be hermes."""
    (tmp_path / "tokenizer.json").write_bytes(vocabulary("chatml"))
    write_card(tmp_path, card())
    return tmp_path


def test_uses_the_format_that_a_checkpoint_was_trained_in_and_else_the_configured_one(folder: Path) -> None:
    assert format_at(folder, learned()).name == "compact"
    assert format_of(folder, learned("policy.format=compact")) == "compact"
    (folder / CHECKPOINT).unlink()
    assert read_checkpoint(folder) is None
    assert format_at(folder, learned()).name == "hermes"
    assert format_of(folder, Config()) == "auto"
    assert format_of(folder, learned("policy.format=hermes")) == "hermes"


SWITCHES = [f"env.{name}.on=false" for name in ("fan_out", "read", "review", "evidence", "history", "dedup")]
EARLIER = {name: value for name, value in learned().env.plain().items() if name != "max_turns"} | {"luck": 3}


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({}, ["env.max_turns=9", "env.grep.on=true"], r"max_turns=9 \(trained: 6\), env\.grep\.on=True \(trained: F"),
        ({}, ["policy.format=hermes"], r"differs in policy\.format=hermes \(trained: compact\)\."),
        ({}, ["policy.format=hermes", "env.max_turns=7", *SWITCHES], r"env\.read\.on=False .* and 2 more\. Without"),
        ({"env_hash": "of other words"}, [], "differs in the wording of the prompt or of a tool"),
        ({"env": EARLIER, "env_hash": "of that version"}, [], r"max_turns=6 \(trained: None\), env\.luck=None \(t"),
    ],
)
def test_another_environment_or_format_is_refused_with_each_difference(
    folder: Path, changes: dict[str, Any], settings: list[str], says: str
) -> None:
    write_card(folder, card(**changes))
    with pytest.raises(ConfigError, match=says) as refused:
        format_of(folder, learned(*settings))
    assert "--set machine.model.foreign=true" in str(refused.value)
    wanted = "hermes" if "policy.format=hermes" in settings else "compact"
    assert format_of(folder, learned(*settings, "machine.model.foreign=true")) == wanted


def test_rejects_a_foreign_checkpoint_before_reading_its_weights(folder: Path) -> None:
    for spec in (f"hf:{folder}", f"vllm:{folder}", f"vllm:{folder}@http://127.0.0.1:1"):
        with pytest.raises(ConfigError, match="was trained for another environment"):
            open_model(spec, Config())


def test_hashes_the_weights_of_a_model_and_not_its_cards(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "bare")
    carded = Path(shutil.copytree(tmp_path / "bare", tmp_path / "carded"))
    write_card(carded, card())
    for name in ("stage.json", "data_card.json", "data_README.md", "log.jsonl", "state/state.pt"):
        (carded / name).parent.mkdir(exist_ok=True)
        (carded / name).write_text("{}")
    assert folder_hash(carded) == folder_hash(tmp_path / "bare")
    save_tiny_model(carded, seed=1)
    assert folder_hash(carded) != folder_hash(tmp_path / "bare")


def test_differences_are_named_by_their_path_with_both_values() -> None:
    ours = {"a": 1, "b": {"c": 1, "d": {"e": 1}}, "f": {"g": 1}, "only": 0}
    theirs = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": 4, "gone": [1]}
    found = [("env.b.c", 1, 2), ("env.b.d.e", 1, 3), ("env.f", {"g": 1}, 4), ("env.only", 0, None)]
    assert list(differences(ours, theirs, "env.")) == [*found, ("env.gone", None, [1])]
    assert list(differences(ours, ours)) == []


def test_the_environment_that_a_checkpoint_carries_is_the_one_that_it_was_trained_in(folder: Path) -> None:
    at_server = load_config(None, [f"machine.model.tokenizer={folder}"])
    for spec, config in ((f"hf:{folder}", Config()), (str(folder), Config()), ("vllm:m@http://127.0.0.1:1", at_server)):
        carried = load_config(None, None, environment_of(spec, config))
        assert carried.env == learned().env
        assert format_of(folder, carried) == "compact"
    for spec in ("scripted", "hf:smollm2-135m", "openai:m@http://127.0.0.1:1/v1"):
        assert environment_of(spec, Config()) is None


def test_settings_of_a_checkpoint_are_below_those_that_are_given(folder: Path, tmp_path: Path) -> None:
    env = environment_of(str(folder), Config())
    (tmp_path / "plain.toml").write_text("[rl]\nsamples = 3")
    (tmp_path / "whole.toml").write_text("[env]\nmax_turns = 9")
    assert load_config(tmp_path / "plain.toml", None, env).env == learned().env
    assert load_config(tmp_path / "whole.toml", None, env).env == load_config(None, ["env.max_turns=9"]).env
    assert load_config(None, ["env.max_turns=9"], env).env == learned("env.max_turns=9").env
    assert env == environment_of(str(folder), Config()), "the settings given are not written into"


def test_rejects_an_environment_of_another_version_unless_foreign_is_set(folder: Path) -> None:
    write_card(folder, card(env={"luck": 3}))
    with pytest.raises(ConfigError, match=r"trained by another version.*luck.*machine\.model\.foreign=true"):
        environment_of(f"hf:{folder}", Config())
    assert environment_of(f"hf:{folder}", load_config(None, ["machine.model.foreign=true"])) is None
