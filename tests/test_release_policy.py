"""A checkpoint becomes a released policy that opens by its name; what would be refused at every use is not released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.release_policy import release
from harness1.cli.options import resolve
from harness1.config import Lora, load_config
from harness1.env.environment import env_hash
from harness1.errors import ConfigError
from harness1.model_folder import fetched_models, folder_hash
from harness1.models import spec
from harness1.models.checkpoint import Checkpoint
from harness1.models.spec import list_released
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.registry import open_policy
from harness1.training.saving import write_card
from tests.models.test_adapters import save_adapters
from tests.sft.test_fine_tuning import save_student

SETTINGS = '[policy]\nformat = "compact"\n[env]\nmax_turns = 3\ncontext_window = 256\ngeneration_reserve = 64\n'


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS)
    return str(path)


@pytest.fixture
def checkpoint(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Adapters on the fetched model `tiny`, trained in the environment of the configuration."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(spec, "_home", lambda: tmp_path / "policies")
    fetched = fetched_models() / "tiny"
    fetched.parent.mkdir(parents=True)
    folder = tmp_path / "checkpoint"
    save_adapters(folder, save_student(fetched), Lora(rank=2))
    describe(folder, config, adapter_base=folder_hash(fetched))
    return folder


def describe(folder: Path, config: str, **changed: Any) -> None:
    env = load_config(config).env
    card = Checkpoint(format="compact", counter="c", env=env.plain(), env_hash=env_hash(env), base="b", step=1)
    write_card(folder, msgspec.structs.replace(card, **changed))


def test_a_released_checkpoint_opens_by_its_name_in_its_own_environment(
    checkpoint: Path, config: str, tmp_path: Path
) -> None:
    release(checkpoint, "tiny", config, tmp_path / "policies" / "clever")
    assert list_released() == ["clever"]
    asked = resolve(None, None, "clever")
    assert (asked.env, asked.policy) == (load_config(config).env, load_config(config).policy)
    assert isinstance(open_policy("clever", config=asked), LanguageModelPolicy)
    sampled = resolve(None, ["policy.temperature=0.5"], "clever")
    assert isinstance(open_policy("clever", config=sampled), LanguageModelPolicy)
    with pytest.raises(ConfigError, match=r"another environment, which differs in env.max_turns=9 \(trained: 3\)"):
        open_policy("clever", config=resolve(None, ["env.max_turns=9"], "clever"))


def test_settings_changed_for_the_training_are_those_that_are_released(
    checkpoint: Path, config: str, tmp_path: Path
) -> None:
    shorter = tmp_path / "shorter.toml"
    shorter.write_text(SETTINGS.replace("max_turns = 3", "max_turns = 2"))
    out = tmp_path / "policies" / "clever"
    with pytest.raises(SystemExit, match="trained for another environment"):
        release(checkpoint, "tiny", str(shorter), out)
    release(checkpoint, "tiny", str(shorter), out, ["env.max_turns=3"])
    assert resolve(None, None, "clever").env == load_config(config).env


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"env_hash": "other"}, "trained for another environment"),
        ({"format": "hermes"}, "trained for the format hermes"),
    ],
)
def test_a_checkpoint_that_its_configuration_does_not_fit_is_not_released(
    checkpoint: Path, config: str, tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    describe(checkpoint, config, **changed)
    with pytest.raises(SystemExit, match=said):
        release(checkpoint, "tiny", config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_on_another_model_are_not_released(checkpoint: Path, config: str, tmp_path: Path) -> None:
    save_student(fetched_models() / "other", max_position_embeddings=1024)
    with pytest.raises(SystemExit, match="holds no adapters on other"):
        release(checkpoint, "other", config, tmp_path / "out")
