"""A recorded run as frames of pandas and polars."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import polars as pl
import pytest

import harness1
from harness1.errors import MissingExtra, UsageError
from tests.support import END, Script, search
from tests.viewer.making import script, some_tasks, write_dataset, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four tasks: one that shows everything, one that fails its format, and two that end at once."""
    home = tmp_path_factory.mktemp("frames")
    tasks = some_tasks(4)
    dataset = write_dataset(home / "data", tasks)
    write_run(home / "run", [script(), Script(search("Ada"), "no call"), Script(END)], tasks, dataset)
    return home / "run"


def columns(frame: Any, names: list[str]) -> list[tuple[Any, ...]]:
    return [
        tuple(None if pd.isna(value) else value for value in row)
        for row in zip(*(frame[name].to_list() for name in names), strict=True)
    ]


@pytest.mark.parametrize(("library", "kind"), [("pandas", pd.DataFrame), ("polars", pl.DataFrame)])
def test_each_episode_is_a_row_with_its_scores_and_costs(folder: Path, library: Any, kind: type) -> None:
    frame = harness1.load_run(folder).tasks(library)
    assert isinstance(frame, kind)
    ends = [("task-0", "search", 7), ("task-1", "format", 2), ("task-2", "empty", 1), ("task-3", "empty", 1)]
    assert columns(frame, ["task", "class", "turns"]) == ends
    assert frame["curated_recall"].to_list()[0] == pytest.approx(2 / 3)
    assert columns(frame, ["very_high", "high", "fair", "low"])[0] == (1, 1, 3, 0)
    assert min(frame["prompt_tokens"].to_list()) > 0
    assert columns(frame, ["output_tokens"])[0] == (None,)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_each_turn_is_a_row_with_what_was_found_so_far(folder: Path, library: Any) -> None:
    frame = harness1.load_run(folder).turns(library)
    rows = [row for row in columns(frame, ["task", "turn", "tool", "found", "targets"]) if row[0] == "task-0"]
    assert [row[2] for row in rows][:3] == ["search_corpus", "fan_out_search", "curate"]
    assert [row[1] for row in rows] == list(range(1, 8))
    found = [row[3] for row in rows]
    assert found == sorted(found)
    assert (found[-1], rows[0][4]) == (2, 3)
    assert columns(frame, ["task", "error"])[8] == ("task-1", "parse_error")


def test_without_gold_scores_are_missing_and_costs_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [script()], some_tasks(1), None)
    run = harness1.load_run(tmp_path / "run")
    frame = run.tasks("pandas")
    assert "curated_recall" not in frame
    assert columns(frame, ["class", "turns"]) == [("unscored", 7)]
    assert columns(run.turns("polars"), ["found", "targets"])[0] == (None, None)


def test_a_training_is_read_by_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stage.json").write_bytes(msgspec.json.encode({"verb": "rl train", "inputs": {}}))
    (tmp_path / "episodes").symlink_to(folder)
    assert len(harness1.load_run(tmp_path).tasks("pandas")) == 4


def test_a_missing_library_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = harness1.load_run(folder)
    with pytest.raises(UsageError, match="pandas or polars"):
        run.tasks("numpy")  # type: ignore[arg-type]
    original = importlib.util.find_spec
    monkeypatch.setattr("harness1.eval.outputs.find_spec", lambda name: None if name == "pandas" else original(name))
    assert isinstance(run.tasks(), pl.DataFrame)
    monkeypatch.setattr("harness1.eval.outputs.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="frames"):
        run.tasks()
