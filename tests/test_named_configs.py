"""Configurations that come with the package: found by name in every folder, and listed where a name is wrong."""

from pathlib import Path

import msgspec
import pytest

from harness1.config import Config, configurations, load_config, opening
from harness1.config.settings import differences
from harness1.errors import ConfigError
from tests.cli.commands import command_in_process

SERVICE, SHARDED = ENGINES = ["engines/gpt-oss-20b-tinker", "engines/gpt-oss-20b"]
LEARNING = [f"{verb}/{name}" for verb in ("rl", "sft") for name in ("handles", "paper", "small")]
NAMES = ["local", "micro", "paper", "small", "transcript", *ENGINES, *LEARNING]


def test_the_configurations_of_the_package_are_found_by_name() -> None:
    assert [*configurations()] == NAMES
    for name, file in configurations().items():
        assert load_config(name) == load_config(file) != Config()


def test_the_recipes_for_engines_are_the_published_one_but_for_where_it_runs() -> None:
    published = msgspec.to_builtins(load_config("rl/paper"))
    found = {}
    for name in ENGINES:
        own = msgspec.to_builtins(load_config(name))
        pairs = {path: value for path, value, _ in differences(own, published) if not path.startswith("machine.")}
        found[name] = pairs
    both = {"policy.format": "harmony", "policy.dtype": "bfloat16"}
    sharded = {"rl.staleness": 1, "train.attention": "flex_attention"}
    assert found == {SHARDED: both | sharded, SERVICE: both | {"train.checkpointing": False}}


def test_the_recipe_with_a_server_names_options_that_fit_its_settings() -> None:
    config, text = load_config(SHARDED), configurations()[SHARDED].read_text()
    assert f"--max-loras {config.rl.staleness + 2} " in text
    assert f"--max-lora-rank {config.train.lora.rank} " in text
    assert f"--max-model-len {config.env.context_window} " in text


def test_a_name_means_the_same_in_a_folder_with_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").write_text("[env]\nmax_turns = 3\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("small") == load_config(configurations()["small"])
    assert load_config("./small").env.max_turns == 3


@pytest.mark.parametrize(
    ("given", "meant"), [("smal", "small"), ("configs/sft/small.toml", "sft/small"), ("papers.toml", "paper")]
)
def test_a_misspelt_name_is_answered_with_all_names_and_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config(Path(given))
    assert str(told.value) == (
        f"there is no configuration {given}: give a TOML file, or one of {', '.join(NAMES)}; did you mean {meant}?"
    )


def test_the_list_shows_in_a_sentence_what_each_configuration_is_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = command_in_process(monkeypatch, capsys)("config", "list").out.splitlines()
    assert lines == [f"{name}: {opening(file)}" for name, file in configurations().items()]
    assert min(len(line.split()) for line in lines) > 6
