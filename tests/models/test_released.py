"""A released policy is opened by its name, brings its configuration, and needs only the model that it stands beside."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness1.cli.options import resolve
from harness1.config import Config, Lora, load_config
from harness1.errors import UsageError
from harness1.model_folder import fetched_models
from harness1.models import spec
from harness1.models.spec import is_model, released_config, released_folder, released_names
from harness1.models.tokenizer import open_tokenizer
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.registry import check_policy, open_policy
from tests.models.test_adapter_files import save_adapters, settings
from tests.sft.test_fine_tuning import save_student

SETTINGS = '[policy]\nformat = "compact"\ntemperature = 0.0\n[env]\nmax_turns = 3\ncontext_window = 256\n'


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A released policy `clever` on the fetched model `tiny`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(spec, "_home", lambda: tmp_path / "policies")
    (tmp_path / "policies" / "no policy").mkdir(parents=True)
    fetched = fetched_models() / "tiny"
    fetched.parent.mkdir(parents=True)
    folder = tmp_path / "policies" / "clever"
    save_adapters(folder, save_student(fetched), Lora(rank=2))
    settings(folder, base_model_name_or_path="tiny")
    (folder / "config.toml").write_text(SETTINGS + "generation_reserve = 64\n")
    return fetched


def test_its_name_opens_it_beside_the_fetched_model(base: Path) -> None:
    assert released_names() == ["clever"]
    assert is_model("clever")
    check_policy("clever")
    policy = open_policy("clever", config=resolve(None, None, "clever"))
    assert isinstance(policy, LanguageModelPolicy)
    assert policy.name == "clever"
    assert policy.counter.tokenizer.hash == open_tokenizer(base).hash
    assert policy.settings.temperature == 0.0
    plain = open_policy(f"hf:{base}", config=resolve(None, None, "clever"))
    assert isinstance(plain, LanguageModelPolicy)
    assert plain.hash != policy.hash


def test_it_brings_its_configuration_below_what_the_user_asks_for(base: Path) -> None:
    assert resolve(None, None, "clever") == load_config(released_config("clever")) != Config()
    asked = resolve(None, ["env.max_turns=9"], "clever")
    assert (asked.env.max_turns, asked.env.context_window) == (9, 256)
    assert resolve("small", None, "clever") == load_config("small")
    assert resolve(None, None, "scripted") == resolve(None, None, "") == Config()


def test_without_its_model_it_says_how_to_get_it(base: Path) -> None:
    folder = released_folder("clever")
    assert folder is not None
    settings(folder, base_model_name_or_path="smollm2-135m")
    with pytest.raises(UsageError, match="the model smollm2-135m was not fetched; run: harness1 models get smollm2"):
        open_policy("clever", config=resolve(None, None, "clever"))
    settings(folder, base_model_name_or_path="tiny")
    shutil.rmtree(base)
    with pytest.raises(UsageError, match="need their base model, and there is none at 'tiny'"):
        open_policy("clever", config=resolve(None, None, "clever"))


def test_names_that_do_not_exist_are_answered_with_those_that_do(base: Path) -> None:
    for name in ("clevr", "no policy"):
        assert released_folder(name) is released_config(name) is None
        with pytest.raises(UsageError, match=r"there is no policy .*clever"):
            check_policy(name)
