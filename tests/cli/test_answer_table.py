"""What is printed of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness1.cli.evaluate import print_answers


def summary(run: str, model: str) -> dict[str, Any]:
    none = {"mean": None, "low": None, "high": None}
    row = {"exact_match": {"mean": 0.25, "low": 0.125, "high": 0.5}, "f1": none, "judge": none}
    row |= {"tasks": 4, "documents": 3.0, "empty": 0, "cut": 0, "unparseable": 0, "left_out": 0}
    pair = {"a": "curated", "b": "closed", "metric": "exact_match", "p": 0.5, "p_holm": 1.0}
    counts = dict.fromkeys(("missing", "missing_verdicts", "without_answers", "broken_episodes"), 0)
    return {
        "answerer": {"model": model},
        "run": run,
        "conditions": {"curated": row},
        "pairs": [pair | {"difference": {"mean": 0.125, "low": -0.25, "high": 0.5}}],
        "tasks": 4,
        **counts,
    }


def test_a_difference_and_its_interval_have_a_sign(capsys: pytest.CaptureFixture[str]) -> None:
    print_answers(summary("run", "m"), Path("out"))
    shown = capsys.readouterr().out
    assert " 0.125 to 0.500 " in shown
    assert " +0.125 " in shown
    assert " -0.250 to +0.500 " in shown


def test_paths_and_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_answers(summary("runs/n[/x]:tea:", "openai:m[b]@http://h/v1"), Path("out[/x]:tea:"))
    shown = capsys.readouterr().out
    assert shown.startswith("openai:m[b]@http://h/v1 on runs/n[/x]:tea:\n")
    assert "Everything is in out[/x]:tea:." in shown
