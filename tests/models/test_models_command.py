"""The command line of bundled models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness1.models.fetch import bundled
from harness1.runs.files import Stage
from tests.cli.commands import Command, command_in_process
from tests.tiny_models import save_tiny_model


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def put(cache: Path, name: str) -> None:
    inputs = {key: getattr(bundled(name), key) for key in ("package", "version", "sha256")}
    Stage("models-get", inputs).write(cache / name, status="finished")


def test_list_shows_licence_size_and_place(tmp_path: Path, harness1: Command) -> None:
    put(tmp_path, "minilm")
    shown = harness1("models", "list", "--cache", str(tmp_path), "--json")
    rows = {row["name"]: row for row in json.loads(shown.out)["models"]}
    assert rows["minilm"]["folder"] == str(tmp_path / "minilm")
    assert rows["smollm2-135m"]["folder"] is None
    assert rows["smollm2-135m"]["licence"] == "Apache-2.0"
    lines = harness1("models", "list", "--cache", str(tmp_path)).out
    assert "93 MB, Apache-2.0, not fetched" in lines
    assert str(tmp_path / "minilm") in lines


def test_get_prints_the_folder_and_nothing_else(tmp_path: Path, harness1: Command) -> None:
    put(tmp_path, "minilm")
    arguments = ["models", "get", "minilm", "--cache", str(tmp_path)]
    assert harness1(*arguments).out == f"{tmp_path / 'minilm'}\n"
    found = json.loads(harness1(*arguments, "--json").out)
    assert found == {"name": "minilm", "folder": str(tmp_path / "minilm")}


def test_a_name_that_is_not_bundled_is_refused(tmp_path: Path, harness1: Command) -> None:
    refused = harness1("models", "get", "llama", "--cache", str(tmp_path))
    assert refused.code == 2
    assert "no bundled model 'llama'" in refused.err


def test_convert_prints_the_folder_and_what_it_holds(tmp_path: Path, harness1: Command) -> None:
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "plain"
    shown = harness1("models", "convert", str(model), "--out", str(out))
    assert shown.out == f"{out}\n"
    assert shown.err.endswith("harness1: writing file 1 of 1\n")
    found = json.loads(harness1("models", "convert", str(model), "--out", str(out), "--json").out)
    assert (found["folder"], found["dtype"], found["files"], found["dequantized"]) == (str(out), "bfloat16", 1, 0)
    assert found["size"] == (out / "model.safetensors").stat().st_size - header_size(out / "model.safetensors")


def test_convert_keeps_some_layers_alone(tmp_path: Path, harness1: Command) -> None:
    model = save_tiny_model(tmp_path / "model", num_hidden_layers=3)
    harness1("models", "convert", str(model), "--out", str(tmp_path / "short"), "--layers", "0,2")
    assert json.loads((tmp_path / "short" / "config.json").read_text())["num_hidden_layers"] == 2
    refused = harness1("models", "convert", str(model), "--out", str(tmp_path / "other"), "--layers", "0-2")
    assert refused.code == 2
    assert "write numbers with commas" in refused.err


def header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")
