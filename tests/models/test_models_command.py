"""The command line of bundled models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness1.cli.models import app
from harness1.errors import UsageError
from harness1.models.files.bundled import bundled
from harness1.runs.stage import Stage


def put(cache: Path, name: str) -> None:
    inputs = {key: getattr(bundled(name), key) for key in ("package", "version", "sha256")}
    Stage("models-get", inputs).write(cache / name, status="finished")


def test_list_shows_licence_size_and_place(tmp_path: Path) -> None:
    put(tmp_path, "minilm")
    shown = CliRunner().invoke(app, ["list", "--cache", str(tmp_path), "--json"])
    rows = {row["name"]: row for row in json.loads(shown.stdout)["models"]}
    assert rows["minilm"]["folder"] == str(tmp_path / "minilm")
    assert rows["smollm2-135m"]["folder"] is None
    assert rows["smollm2-135m"]["licence"] == "Apache-2.0"
    lines = CliRunner().invoke(app, ["list", "--cache", str(tmp_path)]).stdout
    assert "93 MB, Apache-2.0, not fetched" in lines
    assert str(tmp_path / "minilm") in lines


def test_get_prints_the_folder_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, "minilm")
    arguments = ["get", "minilm", "--cache", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).stdout == f"{tmp_path / 'minilm'}\n"
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found == {"name": "minilm", "folder": str(tmp_path / "minilm")}


def test_a_name_that_is_not_bundled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no bundled model 'llama'"):
        CliRunner().invoke(app, ["get", "llama", "--cache", str(tmp_path)], catch_exceptions=False)
